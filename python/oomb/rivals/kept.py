"""Attention's outputs of whole sequences, kept on the host so that a recompute need not run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomb.rivals.offload import OffloadedInputs

# What SDPA runs, by backend. The first two results are the output and the log-sum-exp.
_ATTENTION = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
_KEPT = 2  # results that grow with the sequence


class KeptAttention:
    """Output and log-sum-exp of each layer's attention, in pinned host memory.

    Autograd records attention above the dispatcher and its results below, as selective activation
    checkpointing has it. So a recompute inside :meth:`again` leaves the usual backward, without
    the forward:

        forward    with storing(layer): attention                 output, log-sum-exp ──▶ host
        backward   with again(layer):   attention's graph alone   ◀── copied since the layer before

    Args:
        values: of one layer's output.
        rows: of one layer's log-sum-exp.
    """

    def __init__(
        self, num_layers: int, values: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sizes = torch.Size((values,)), torch.Size((rows,))
        self._stack = ExitStack()
        self._stores = [
            self._stack.enter_context(OffloadedInputs(num_layers, size, kind, device))
            for size, kind in zip(sizes, (dtype, wide), strict=True)
        ]
        self._results: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(store.nbytes for store in self._stores)

    @contextmanager
    def storing(self, layer: int) -> Iterator[None]:
        """Attention's results inside go to the host."""

        def store(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            results = func(*_with_log_sum_exp(func, args), **kwargs)
            kept: list[Any] = list(results)
            for index, home in enumerate(self._stores):
                home.put(layer, _flat(results[index]))
                kept[index] = results[index].shape, results[index].stride()
            self._results[layer] = func, tuple(kept)
            return results

        with _Instead(store):
            yield

    @contextmanager
    def again(self, layer: int) -> Iterator[None]:
        """Attention inside computes nothing: it gives what :meth:`storing` has stored."""
        func, kept = self._results[layer]

        def give(asked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert asked is func, f"{asked} in the recompute, {func} in the forward"
            back = [
                home.get(layer).as_strided(*kept[index]) for index, home in enumerate(self._stores)
            ]
            return (*back, *kept[_KEPT:])

        with _Instead(give):
            yield
        del self._results[layer]

    def __enter__(self) -> KeptAttention:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._results.clear()
        self._stack.__exit__(kind, error, trace)


class _Instead(TorchDispatchMode):
    """While active, attention's operation is what ``run`` makes of it."""

    def __init__(self, run: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in _ATTENTION:
            return self._run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _with_log_sum_exp(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """SDPA asks some backends for it only where a gradient will be wanted."""
    names = [argument.name for argument in func._schema.arguments]
    if "compute_log_sumexp" not in names:
        return args
    place = names.index("compute_log_sumexp")
    return (*args[:place], True, *args[place + 1 :])


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Its values in the order of memory."""
    order = sorted(range(x.dim()), key=lambda axis: (x.stride(axis), x.shape[axis]), reverse=True)
    ordered = x.permute(order)
    assert ordered.is_contiguous(), f"results with holes: {tuple(x.shape)}, {x.stride()}"
    return ordered.reshape(-1)
