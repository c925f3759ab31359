"""A stopwatch of work on a GPU, on events that stand in for its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomb.core.stopwatch import Stopwatch

GPU = torch.device("cuda")


class Stream:
    """Work in order: 1 ms of each piece, done only when somebody waits for it."""

    def __init__(self) -> None:
        self.recorded = self.done = 0

    def event(self, **_: Any) -> Event:
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._place = stream, 0

    def record(self, _: object) -> None:
        self._stream.recorded += 1
        self._place = self._stream.recorded

    def query(self) -> bool:
        return self._stream.done >= self._place

    def synchronize(self) -> None:
        self._stream.done = max(self._stream.done, self._place)

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(end._place - self._place)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made)
    return made


@pytest.mark.parametrize("done", [0, 1, 2, 3, 6])
def test_total_waits_for_what_is_under_way(stream: Stream, done: int) -> None:
    """A step ends with an exchange that no rank has waited for yet."""
    stopwatch = Stopwatch()
    for _ in range(3):
        with stopwatch.running(GPU):
            pass
    stream.done = done
    assert stopwatch.total == pytest.approx(3e-3)
    assert stopwatch.total == pytest.approx(3e-3)


def test_nobody_waits_while_it_runs(stream: Stream) -> None:
    stopwatch = Stopwatch()
    for _ in range(5):
        with stopwatch.running(GPU):
            pass
    assert stream.done == 0
