"""Seconds of work on a device, which nobody waits for until they are asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up what pieces of work take, in the current stream of a GPU or on the CPU."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Counts what is done inside."""
        if device.type == "cuda":
            begin, end = self._free.pop() if self._free else _two_events()
            begin.record(torch.cuda.current_stream(device))
            yield
            end.record(torch.cuda.current_stream(device))
            self._events.append((begin, end))
            while self._events and self._events[0][1].query():  # a long call would have thousands
                self._take_first()
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    @property
    def total(self) -> float:
        """Seconds; waits for a GPU that is not done with the work."""
        while self._events:
            self._take_first()
        return self._seconds

    def _take_first(self) -> None:
        begin, end = self._events.popleft()
        end.synchronize()
        self._seconds += begin.elapsed_time(end) / 1000
        self._free.append((begin, end))


def _two_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
