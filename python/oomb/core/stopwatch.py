"""Seconds of work on a device, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up what pieces of work take, in the current stream of a GPU or on the CPU."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Counts what is done inside."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(device))
            yield
            end.record(torch.cuda.current_stream(device))
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    @property
    def total(self) -> float:
        """Seconds; a GPU has to be done with the work."""
        return self._seconds + float(sum(a.elapsed_time(b) for a, b in self._events)) / 1000
