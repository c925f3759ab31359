"""The machine that a plan is for: this one, or one that is described."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, get_args, get_type_hints

import torch

from oomb.config import Config
from oomb.core.tiers import free_memory
from oomb.model.layer_shape import compute_capability
from oomb.plan.gpus import HOST_BYTES, Gpu, gpu_of_figures
from oomb.units import parse_size

_CONTEXT_BYTES = 2**30  # the driver's context, loaded kernels, the libraries' work space


# Weights, by the ranks of a sequence.
HELD = ("replicated", *get_args(get_type_hints(Config)["sharded_weights"]))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory that a run can have, and the device that does the work.

    Where ranks share a sequence, all of it is of one rank.

    Attributes:
        device_type: ``"cuda"`` or ``"cpu"``; on the CPU both tiers share the host's memory.
        name: for people.
        device_bytes: memory of the device that torch and the page pool can have.
        host_bytes: memory of the host that the host tier can have.
        local: it is this machine, which can be measured.
        gpu: figures of one that cannot be measured, or None.
        fused: norms and gates will run as fused kernels.
        host_assumed: nobody has said what the host's memory is: it is that of ``gpu.host_bytes``.
        ranks: that share each sequence, a device each.
        neighbours: that share the host's memory.
        weights: how ranks hold a model's: ``"replicated"``, or shared as ``"zero1"``,
            ``"zero2"`` or ``"zero3"``, see ``Config.sharded_weights``.
    """

    device_type: Literal["cuda", "cpu"]
    name: str
    device_bytes: int
    host_bytes: int
    local: bool
    gpu: Gpu | None = None
    fused: bool = False
    host_assumed: bool = False
    ranks: int = 1
    neighbours: int = 1
    weights: str = "replicated"

    @property
    def capability(self) -> int | None:
        """Compute capability of the GPU, 90 for 9.0; None: there is none."""
        if self.device_type == "cpu":
            return None
        if self.gpu is not None:
            return self.gpu.capability
        here = compute_capability(torch.device("cuda")) if self.local else None
        return here or Gpu.capability

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
        tflops: float | None = None,
        bandwidth: float | None = None,
        link: float | None = None,
    ) -> Machine:
        """A machine by its GPU and sizes.

        Without a GPU's name or figures it is this one, where there is a GPU or no
        ``device_memory``; then what is not given is what is free here. A GPU that is not here comes
        with a host of its own.

        Args:
            gpu: a name of :data:`oomb.plan.GPUS`, or None.
            device_memory, host_memory: bytes or text such as ``"141GB"``, the whole of each.
            tflops: dense bf16 TFLOP/s of the GPU.
            bandwidth, link: GB/s of its memory, and to the host, each way.

        Raises:
            ValueError: an unknown GPU, figures without a memory, or a size that is none.
        """
        device_bytes = parse_size("device_memory", device_memory)
        host_bytes = parse_size("host_memory", host_memory)
        elsewhere = gpu_of_figures(gpu, device_bytes, tflops, bandwidth, link)
        if elsewhere is not None:
            base = _with_gpu(elsewhere.name, elsewhere.memory_bytes, elsewhere)
        elif device_bytes is not None and not torch.cuda.is_available():
            base = _with_gpu("a GPU", device_bytes, None)
        else:
            base = Machine.here()
            if device_bytes is not None:
                context = _CONTEXT_BYTES if base.device_type == "cuda" else 0
                base = replace(base, device_bytes=max(0, device_bytes - context))
        if host_bytes is not None:
            base = replace(base, host_bytes=host_bytes, host_assumed=False)
        return base

    def of_rank(
        self, ranks: int, neighbours: int | None = None, weights: str = "replicated"
    ) -> Machine:
        """What one of several ranks has of this machine.

        A host that is assumed has as much memory for each GPU.

        Args:
            ranks: that share each sequence, a device each.
            neighbours: that share the host's memory; None: all of them.
            weights: how the ranks hold a model's, as of the attribute.

        Raises:
            ValueError: weights that are held otherwise.
        """
        if weights not in HELD:
            raise ValueError(
                f"sharded_weights: expected one of {', '.join(HELD[1:])}, got {weights!r}"
            )
        here = ranks if neighbours is None else neighbours
        on_cpu = self.device_type == "cpu"
        return replace(
            self,
            ranks=ranks,
            neighbours=here,
            weights=weights,
            device_bytes=self.device_bytes // here if on_cpu else self.device_bytes,
            host_bytes=self.host_bytes if self.host_assumed else self.host_bytes // here,
        )


def _with_gpu(name: str, memory_bytes: int, gpu: Gpu | None) -> Machine:
    """A machine that is not this one; of ``gpu`` None only the memory is known."""
    return Machine(
        device_type="cuda",
        name=name,
        device_bytes=max(0, memory_bytes - _CONTEXT_BYTES),
        host_bytes=HOST_BYTES if gpu is None else gpu.host_bytes,
        local=False,
        gpu=gpu,
        fused=True,
        host_assumed=True,
    )


def _has_fused_kernels() -> bool:
    return find_spec("liger_kernel") is not None
