"""One call at a time in a process: a second one is refused before it touches anything."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack

from oomb.errors import Error

_lock = threading.RLock()  # a signal's handler may close an engine
_running: object | None = None  # the call under way
_behind: list[Callable[[], object]] = []  # what waits for its end


def expect_none() -> None:
    """Raise an Error while a call is under way, in this thread or in another one."""
    if _running is not None:
        raise Error("engine: expected one call at a time, got one inside or beside another")


def begin(call: object) -> None:
    """``call`` is under way from now on, until its :func:`end`.

    Raises:
        Error: another one is.
    """
    global _running
    with _lock:
        expect_none()
        _running = call


def end(call: object) -> None:
    """``call`` is over; harms nothing where it was not under way."""
    global _running
    with _lock:
        if _running is not call:
            return
        _running = None
        waiting = _behind[::-1]
        _behind.clear()
    with ExitStack() as stack:
        for work in waiting:
            stack.callback(work)


def when_none(work: Callable[[], object]) -> None:
    """Do ``work`` now, before another call can begin, or at the end of the one under way."""
    with _lock:
        if _running is None:
            work()
        else:
            _behind.append(work)


def _forget() -> None:
    """In a forked process: a call of another thread stays with the parent."""
    global _lock, _running
    _lock, _running = threading.RLock(), None
    _behind.clear()


os.register_at_fork(after_in_child=_forget)
