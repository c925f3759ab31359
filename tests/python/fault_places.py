"""The places of a step at which a call of the page manager can fail, each found by running once.

A step makes thousands of such calls, of few kinds. A place is a method in a part of the step:

    making pools      __init__
    fill              begin_call  create  commit  write_output  acquire  release  ...
    sweep             acquire  release  read_output  create_gradients  drop  ...  end_call
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oomb
from oomb import _C

# Those that ask or give back, and have to work whatever has failed.
_NEVER = {"close", "snapshot", "stats", "waits", "check_integrity"}
METHODS = [
    name
    for name, member in vars(_C.PageManager).items()
    if callable(member) and name not in _NEVER and (name == "__init__" or name[0] != "_")
]


@dataclass(frozen=True)
class Place:
    """Where a step is: ``method`` is ``""`` outside the page manager."""

    method: str
    part: str


@contextmanager
def around_methods(around: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Every method of every page manager runs inside ``around(name, call)``."""
    plain = {name: getattr(_C.PageManager, name) for name in METHODS}

    def replaced(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **keywords: Any) -> Any:
            return around(name, lambda: plain[name](self, *args, **keywords))

        return method

    try:
        for name in METHODS:
            setattr(_C.PageManager, name, replaced(name))
        yield
    finally:
        for name, member in plain.items():
            setattr(_C.PageManager, name, member)


class Parts:
    """Tells the part of a step that runs, from what the engine reports."""

    def __init__(self) -> None:
        self.part = "beginning"

    def __call__(self, progress: oomb.Progress) -> None:
        self.part = progress.phase


def calls_by_place(step: Callable[[Parts], Any]) -> dict[Place, list[int]]:
    """Numbers of the page manager's method calls in one step, by place."""
    parts, calls = Parts(), 0
    found: dict[Place, list[int]] = {}

    def around(name: str, call: Callable[[], Any]) -> Any:
        nonlocal calls
        found.setdefault(Place(name, parts.part), []).append(calls)
        calls += 1
        return call()

    with around_methods(around):
        step(parts)
    return found


@contextmanager
def failing_call(number: int, error: Exception, done: bool) -> Iterator[None]:
    """The method call of that number raises ``error``: after its work if ``done``, else instead."""
    calls = 0

    def around(name: str, call: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != number:
            return call()
        if done:
            call()
        raise error

    with around_methods(around):
        yield


def cuda_calls_by_place(step: Callable[[Parts], Any]) -> dict[tuple[Place, int], list[int]]:
    """Numbers of the tiers' CUDA calls in one step: by place, and by their order within a method.

    Calls of other threads count where the step is just then.
    """
    parts = Parts()
    found: dict[tuple[Place, int], list[int]] = {}
    began = seen = _C.cuda_calls_made()

    def note(place: Place) -> None:
        nonlocal seen
        now = _C.cuda_calls_made()
        for order, number in enumerate(range(seen, now)):
            found.setdefault((place, order), []).append(number - began)
        seen = now

    def around(name: str, call: Callable[[], Any]) -> Any:
        note(Place("", parts.part))
        try:
            return call()
        finally:
            note(Place(name, parts.part))

    with around_methods(around):
        step(parts)
    note(Place("", parts.part))
    return found


def first_and_last(numbers: list[int]) -> set[int]:
    return {numbers[0], numbers[-1]}
