"""The machine that a plan is for: this one, or one that is described."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch

from oomb.config import parse_size
from oomb.core.tiers import free_memory
from oomb.plan.gpus import GPUS, Gpu

_CONTEXT_BYTES = 2**30  # the driver's context, loaded kernels, the libraries' work space


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory that a run can have, and the device that does the work.

    Attributes:
        device_type: ``"cuda"`` or ``"cpu"``; on the CPU both tiers share the host's memory.
        name: for people.
        device_bytes: memory of the device that torch and the page pool can have.
        host_bytes: memory of the host that the host tier can have.
        local: it is this machine, which can be measured.
        gpu: datasheet of a machine that cannot be measured, or None.
        fused: norms and gates will run as fused kernels.
    """

    device_type: Literal["cuda", "cpu"]
    name: str
    device_bytes: int
    host_bytes: int
    local: bool
    gpu: Gpu | None = None
    fused: bool = False

    @staticmethod
    def here(device_type: str | None = None) -> Machine:
        """This machine, with what is free on it now (before a model is loaded)."""
        host = free_memory(torch.device("cpu"))
        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind == "cpu":
            name = f"CPU, {torch.get_num_threads()} threads"
            return Machine(
                device_type="cpu", name=name, device_bytes=host, host_bytes=host, local=True
            )
        device = torch.device("cuda", torch.cuda.current_device())
        return Machine(
            device_type="cuda",
            name=torch.cuda.get_device_name(device),
            device_bytes=free_memory(device),
            host_bytes=host,
            local=True,
            fused=_has_fused_kernels(),
        )

    @staticmethod
    def described(
        *,
        gpu: str | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> Machine:
        """A machine by its GPU and sizes; what is not given is this machine's.

        Args:
            gpu: a name of :data:`oomb.plan.GPUS`, or None: this machine's device.
            device_memory, host_memory: bytes or text such as ``"141GB"``, the whole of each.

        Raises:
            ValueError: an unknown GPU, or a size that is none.
        """
        device_bytes = parse_size("device_memory", device_memory)
        host_bytes = parse_size("host_memory", host_memory)
        if gpu is None and (device_bytes is None or torch.cuda.is_available()):
            base = Machine.here()
        else:
            base = _with_gpu(gpu, device_bytes or 0)
        if host_bytes is not None:
            base = replace(base, host_bytes=host_bytes)
        if device_bytes is not None:
            context = _CONTEXT_BYTES if base.device_type == "cuda" else 0
            base = replace(base, device_bytes=max(0, device_bytes - context))
        return base


def _with_gpu(name: str | None, memory_bytes: int) -> Machine:
    """A machine with a GPU by name, or with one of which only the memory is known."""
    gpu = None
    if name is not None:
        gpu = GPUS.get(name.lower().replace(" ", ""))
        if gpu is None:
            raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return Machine(
        device_type="cuda",
        name=gpu.name if gpu else "a GPU",
        device_bytes=(gpu.memory_bytes if gpu else memory_bytes) - _CONTEXT_BYTES,
        host_bytes=free_memory(torch.device("cpu")),
        local=False,
        gpu=gpu,
        fused=True,
    )


def _has_fused_kernels() -> bool:
    return find_spec("liger_kernel") is not None
