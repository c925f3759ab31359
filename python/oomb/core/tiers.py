"""The two memory tiers of one call: sizes, caps and the page manager."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oomb import _C

_DTYPE_BYTES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
TIER_SHARE = 0.9  # of free memory: what a tier without a cap may take


@dataclass(frozen=True)
class PageLayout:
    """One page of one layer: K then V, each [kv_heads, page_size, head_dim]."""

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    grad_dtype: torch.dtype

    @property
    def element_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        return 2 * self.kv_heads * self.page_size * self.head_dim * self.element_bytes

    @property
    def summary_bytes(self) -> int:
        """Mean key of a page, per KV head."""
        return self.slot_bytes // (2 * self.page_size)

    @property
    def grad_slots(self) -> int:
        """Slots of a gradient page: dK and dV in one, or one each."""
        return max(1, _DTYPE_BYTES[self.grad_dtype] // _DTYPE_BYTES[self.dtype])

    @staticmethod
    def of(
        kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, grad: str
    ) -> PageLayout:
        grad_dtype = torch.float64 if dtype == torch.float64 else getattr(torch, grad)
        if _DTYPE_BYTES[grad_dtype] < _DTYPE_BYTES[dtype]:
            grad_dtype = dtype
        return PageLayout(kv_heads, head_dim, page_size, dtype, grad_dtype)


def slots_of_call(layout: PageLayout, num_layers: int, kv_pages: int, gradient_pages: int) -> int:
    """Slots in use at once at most: the start of the sweep, with every page of both kinds alive."""
    return num_layers * (kv_pages + gradient_pages * layout.grad_slots)


@dataclass(frozen=True)
class Held:
    """Pools that an earlier call has left: slots they may have."""

    device_slots: int
    host_slots: int


@dataclass(frozen=True)
class Caps:
    """Slots that each tier may take in a call.

    Attributes:
        host_slots: 0 where the device tier holds the whole call.
        host_capacity: slots that the host tier may ever have; getting pinned memory is slow, so the
            next call, which may be longer, shall find it again.
    """

    device_slots: int
    host_slots: int
    host_capacity: int


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on a device now: for the GPU with what torch holds unused, and no more
    than ``torch.cuda.set_per_process_memory_fraction`` leaves the process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        unused = torch.cuda.memory_reserved(device) - used
        own = int(total * memory_fraction(device)) - used
        return max(0, min(int(free + unused), own))
    return min(_mem_available(), _cgroup_head_room())


def memory_fraction(device: torch.device) -> float:
    """Part of a GPU's memory that the user has left this process; 1 where torch cannot say."""
    asked: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if asked is None else float(asked(device))


def reserved_ratio(device: torch.device) -> float:
    """Torch's reserved over its allocated memory on a GPU, at their peaks; 1 on a CPU."""
    if device.type != "cuda":
        return 1.0
    allocated = torch.cuda.max_memory_allocated(device)
    return torch.cuda.max_memory_reserved(device) / allocated if allocated else 1.0


def _mem_available() -> int:
    with suppress(OSError):  # a container may hide it
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_head_room() -> int:
    """memory.max - (current - file cache) of the control group; no limit: very large."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return 2**62
        current = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(limit) - (current - int(stat.get("file", 0)))
    except (OSError, ValueError):
        return 2**62


def wave_pages(device: torch.device, page_size: int) -> int:
    """Pages that a wave must not part, so that its end changes no bit of the result.

    Kernels on a GPU say how many keys they take at a time; on the CPU that is one page.
    """
    return max(1, _C.attention_key_tile() // page_size) if device.type == "cuda" else 1


def page_manager(
    device: torch.device, layout: PageLayout, caps: Caps, **test_switches: Any
) -> _C.PageManager:
    """A page manager over pools of equal slots."""
    return _C.PageManager(
        device=str(device),
        slot_bytes=layout.slot_bytes,
        device_slots=caps.device_slots,
        host_slots=caps.host_capacity,
        **test_switches,
    )
