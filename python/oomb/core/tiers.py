"""The two memory tiers of one call: sizes, caps and the page manager."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oomb import _C
from oomb.config import Summary
from oomb.errors import UnsupportedModelError
from oomb.model.layer_shape import LayerShape

_DTYPE_BYTES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
EXPANDED_TOGETHER = 4096  # tokens of a sequence whose latents a GPU expands in one product
TIER_SHARE = 0.9  # of free memory: what a tier without a cap may take


@dataclass(frozen=True)
class PageLayout:
    """Pages in slots of one size: K then V, each [kv_heads, tokens of a page, head_dim].

    Layers of other heads have pages of more or fewer tokens, such that they fill a slot too where
    kernels take such pages; else their pages leave a part of it empty.

    Attributes:
        kv_heads, head_dim, page_size: of the layers that a page rule would choose for, as stored.
        page_sizes: tokens of a page, by layer; empty: ``page_size`` in all.
        largest_page: bytes, of all layers; 0: they are alike.
    """

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    page_sizes: tuple[int, ...] = ()
    largest_page: int = 0

    @property
    def element_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        own = 2 * self.kv_heads * self.page_size * self.head_dim * self.element_bytes
        return self.largest_page or own

    def page_size_of(self, layer: int) -> int:
        return self.page_sizes[layer] if self.page_sizes else self.page_size

    def summary_width(self, summary: Summary) -> int:
        """Numbers that tell a head's keys of a page."""
        return self.head_dim * (2 if summary == "bounds" else 1)

    def summary_bytes(self, summary: Summary) -> int:
        """What is known of a page's keys, in all KV heads."""
        return self.kv_heads * self.summary_width(summary) * self.element_bytes

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

    @staticmethod
    def of_layers(
        shapes: Sequence[LayerShape],
        page_size: int,
        chunk_size: int,
        dtype: torch.dtype,
        grad: str,
        *,
        chooses: bool,
        alike: bool = False,
    ) -> PageLayout:
        """Pages of layers that need not be alike.

        Args:
            page_size: tokens of a page in the layers with the smallest heads; where pages are
                chosen (``chooses``), in the layers that choose.
            alike: it is that of all layers.

        Raises:
            UnsupportedModelError: layers that choose are not alike.
        """
        choosing = next((shape for shape in shapes if not shape.window), shapes[0])
        own = PageLayout.of(choosing.stored_heads, choosing.stored_dim, page_size, dtype, grad)
        rows = [shape.stored_heads * shape.stored_dim for shape in shapes]
        if len(set(rows)) == 1:
            return own
        heads = {(shape.kv_heads, shape.head_dim) for shape in shapes if not shape.window}
        if chooses and len(heads) > 1:
            raise UnsupportedModelError(
                "attention: expected keys and values of one shape in all layers that choose pages, "
                f"got (heads, head dim) of {sorted(heads)}: use oomb.Dense()"
            )
        base = choosing.stored_heads * choosing.stored_dim if chooses else min(rows)
        fast = _C.attention_page_sizes()

        def tokens(row: int, window: int) -> int:
            size, rest = divmod(page_size * base, row)
            taken = size in fast or page_size not in fast
            fits = not rest and size > 0 and chunk_size % size == 0 and taken
            return size if fits and not alike and (window or not chooses) else page_size

        sizes = tuple(tokens(row, shape.window) for row, shape in zip(rows, shapes, strict=True))
        largest = max(size * row for size, row in zip(sizes, rows, strict=True))
        return replace(own, page_sizes=sizes, largest_page=2 * largest * own.element_bytes)


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
    if asked is None:
        return 1.0
    # Torch's other questions take "cuda" for the current one; this takes a number alone.
    return float(asked(torch.cuda.current_device() if device.index is None else device.index))


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
        return max(0, int(limit) - (current - int(stat.get("file", 0))))
    except (OSError, ValueError):
        return 2**62


def wave_pages(device: torch.device, page_size: int, *, latent: bool = False) -> int:
    """Pages that a wave must not part, so that its end changes no bit of the result.

    Kernels on a GPU say how many keys they take at a time; on the CPU that is one page.

    Args:
        latent: some layer expands them from latents, in products of more tokens on a GPU.
    """
    if device.type != "cuda":
        return 1
    together = max(_C.attention_key_tile(), EXPANDED_TOGETHER if latent else 0)
    return max(1, together // page_size)


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
