"""Peak of torch's own CPU allocations, from its profiler: every block, also inside operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_allocated(call: Callable[[], object]) -> int:
    """Most bytes that blocks allocated during ``call`` took together."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    blocks: list[tuple[int, int, int]] = []  # time, address, bytes (negative: freed)
    stack: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.typed[1]
            blocks.append((event.start_time_ns, fields.ptr, fields.alloc_size))
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
