"""Python's garbage collector and calls.

A call makes so many objects that full collections come due within it. Each would walk through
everything the process has imported, and no kernel is launched meanwhile. So objects from before a
call are set aside (``gc.freeze``) while it lasts; what becomes garbage within is collected
all the same. What became garbage among the others waits for a full collection between two calls,
made as soon as it takes no more than a small share of the time.
"""

from __future__ import annotations

import gc
import time

from oomb.model.swap import Swaps, swapping

SHARE = 1 / 400  # of the calls' time, for full collections


class FullCollections:
    """When the next one is due."""

    def __init__(self) -> None:
        self._seconds = 0.0  # that the last one took
        self._since = 0.0  # seconds of calls after it

    def after(self, seconds: float) -> None:
        """Of a call that took so long."""
        self._since += seconds
        if self._since * SHARE < self._seconds:
            return
        began = time.perf_counter()
        gc.collect()
        self._seconds = time.perf_counter() - began
        self._since = 0.0


_full = FullCollections()


@swapping
def older_objects_aside(swaps: Swaps) -> None:
    """For the time of a call; unless somebody else has set objects aside, or collects himself."""
    if not gc.isenabled() or gc.get_freeze_count() > 0:
        return
    gc.collect(1)  # young ones would grow old unseen
    began = time.perf_counter()
    swaps.afterwards(lambda: _full.after(time.perf_counter() - began))
    swaps.afterwards(gc.unfreeze)
    gc.freeze()
