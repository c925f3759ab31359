"""Objects from before a call are out of the collector's way while it lasts, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import oomb
from oomb.core import collector

from .models import make
from .reference import random_ids


class Stopped(Exception):
    pass


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def nothing_aside() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0


def call(stop: bool = False) -> list[int]:
    """Objects set aside at each report of a call."""
    aside: list[int] = []

    def look(progress: oomb.Progress) -> None:
        aside.append(gc.get_freeze_count())
        if stop:
            raise Stopped

    ids = random_ids(1, 48)
    with oomb.Engine(make("qwen2"), oomb.Config(chunk_size=16, page_size=8)) as engine:
        engine.forward_backward(ids, ids, on_progress=look)
    return aside


def test_older_objects_are_set_aside_for_the_call() -> None:
    existing = len(gc.get_objects())
    assert min(call()) > existing / 2


def test_a_call_that_fails_leaves_nothing_aside() -> None:
    with pytest.raises(Stopped):
        call(stop=True)
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_set_aside_stays() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        call()
        assert gc.get_freeze_count() > before / 2
    finally:
        gc.unfreeze()


def test_a_collector_that_is_switched_off_stays_so() -> None:
    gc.disable()
    try:
        assert set(call()) == {0}
    finally:
        gc.enable()


def test_garbage_from_before_a_call_goes_with_it() -> None:
    garbage = weakref.ref(Cycle())
    assert garbage() is not None
    with collector.older_objects_aside():
        assert garbage() is None


def test_what_grew_old_goes_when_calls_have_taken_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(collector.time, "perf_counter", lambda: now)
    full = collector.FullCollections()
    collect = gc.collect
    taken = 0.5

    def slow_collect() -> None:
        nonlocal now
        now += taken
        collect()

    monkeypatch.setattr(collector.gc, "collect", slow_collect)
    full.after(1.0)  # the first tells how long one takes
    garbage = weakref.ref(Cycle())
    full.after(0.9 * taken / collector.SHARE)
    assert garbage() is not None
    full.after(0.2 * taken / collector.SHARE)
    assert garbage() is None
