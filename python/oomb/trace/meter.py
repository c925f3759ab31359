"""Counts live bytes, matrix products and traffic of whatever torch runs, also on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from oomb.model.float8 import PRODUCT as FLOAT8_PRODUCT
from oomb.trace.experts import PRODUCTS, product_flops

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_FLOAT8_SHARE = 0.55  # of the time of a product in bf16 (docs/lab/2026-11-25.md)
_DEVICE_OF = torch.ops.prim.device.default


@dataclass
class Work:
    """What a stretch of a run does.

    Attributes:
        flops: of matrix products in bf16; of one that is bound by memory, and of one in float8,
            those that would take as long.
        moved_bytes: read and written by everything else.
        operations: kernels started, about.
    """

    flops: float = 0
    moved_bytes: float = 0
    operations: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.operations + other.operations,
        )

    def scaled(self, factor: float) -> Work:
        """The same operations on ``factor`` times the data."""
        return Work(self.flops * factor, self.moved_bytes * factor, self.operations)


class Meter(TorchDispatchMode):
    """While active: bytes of living storages that were made under it, their peak, and work done.

    Args:
        flops_per_byte: that the device computes while it moves a byte; 0: moving takes no time.
    """

    def __init__(self, flops_per_byte: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops_per_byte = flops_per_byte
        self.live_bytes = 0
        self.peak_bytes = 0
        self.work = Work()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:  # every other call, and of no tensor that is new
            return func(*args, **kwargs)
        given = self._given(args, kwargs)
        for tensor in given:
            self._keep(tensor.untyped_storage(), counted=False)  # made elsewhere
        out = func(*args, **kwargs)
        results = list(tensors_of(out))
        made = [self._keep(x.untyped_storage(), counted=True) for x in results]
        in_place = any(x is y for x in results for y in given)
        if any(made) or in_place:
            self._count(func, args, kwargs, out, given, results)
        return out

    @contextmanager
    def stretch(self) -> Iterator[Work]:
        """The work done inside, and ``peak_bytes`` starts anew."""
        before, self.work = self.work, Work()
        self.peak_bytes = self.live_bytes
        inside = self.work
        try:
            yield inside
        finally:
            self.work = before + inside

    @contextmanager
    def memory_alone(self) -> Iterator[None]:
        """Work inside is not counted."""
        work, self.work = self.work, Work()
        try:
            yield
        finally:
            self.work = work

    def _given(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors that an operation takes."""
        return [*tensors_of(args), *tensors_of(kwargs)]

    def _keep(self, storage: torch.UntypedStorage, *, counted: bool) -> bool:
        """Follow a storage until it is freed; returns whether it is new."""
        key = storage._cdata
        if key in self._storages:
            return False
        size = storage.nbytes() if counted else 0

        def freed(_: object) -> None:
            self.live_bytes -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return True

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: object,
        given: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        self.work.operations += 1
        packet = func._overloadpacket
        moved = sum(x.numel() * x.element_size() for x in (*given, *results))
        name = packet._qualified_op_name
        flops: float | None = None
        if packet in flop_registry and packet.__name__.split(".")[-1] in _MATRIX_PRODUCTS:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        elif name in PRODUCTS:
            flops = product_flops(name, *given[:2])
        elif name == FLOAT8_PRODUCT:
            flops = _FLOAT8_SHARE * 2 * given[0].numel() * results[0].shape[-1]
        if flops is not None:
            self.work.flops += max(flops, self._flops_per_byte * moved)
            return
        if packet.__name__.startswith("empty") or packet.__name__ == "new_empty":
            self.work.operations -= 1
            return
        self.work.moved_bytes += moved


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Those in what an operation takes or gives; torch's own pytrees take four times as long."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
