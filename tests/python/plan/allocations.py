"""Peak of torch's own CPU allocations, from its profiler: every block, also inside operations."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def peak_allocated(call: Callable[[], object]) -> int:
    """Most bytes that blocks allocated during ``call`` took together."""
    blocks = _blocks(call)
    gc.collect()  # a profile is a circle of references, some 60 MB
    sizes: dict[int, int] = {}
    live = peak = 0
    for _, address, size in sorted(blocks):
        if size > 0:
            live -= sizes.pop(address, 0)  # a thread of another library has freed it
            sizes[address] = size
            live += size
        else:
            live -= sizes.pop(address, 0)  # older blocks are none of the call's
        peak = max(peak, live)
    return peak


def _blocks(call: Callable[[], object]) -> list[tuple[int, int, int]]:
    """Time, address, and bytes of each block; negative where it was freed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    blocks: list[tuple[int, int, int]] = []
    stack: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.typed[1]
            blocks.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return blocks
