"""Two pieces of work that take turns: only one runs at a time, and each says where it stops."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import suppress

from greenlet import getcurrent, greenlet

from oomb.model.modes import kept_modes
from oomb.model.swap import Swaps


class Alternation:
    """Runs two pieces of work in strict turns, in the caller's thread.

        caller   ──work 0──┐           ┌──work 0──┐           ┌──
                           └─ pass_on ─┘          └─ pass_on ─┘
        second              ──work 1───            ──work 1───

    Either may stop deep inside a model's forward, which no generator can: the two have a stack of
    their own (greenlets), context variables, grad mode and autocast; all else they share. Two
    threads could do the same, but each turn would wake one up on a core whose cache holds nothing
    of it. Between :meth:`run` and :meth:`pass_on` lie Python's frames alone: C++ that keeps a place
    on the stack per thread, as a scripted module does, would not find it again.
    """

    def __init__(self) -> None:
        self._first: greenlet | None = None  # None: it does not run, or is over
        self._second: greenlet | None = None

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both to their end. ``first`` starts; an error in either ends both and is raised."""
        restore = kept_modes()
        ended = False

        def second_in_state_of_caller() -> None:
            nonlocal ended
            restore()
            second()
            ended = True

        with Swaps() as swaps:
            swaps.afterwards(restore)
            swaps.afterwards(self._end)
            self._first, self._second = getcurrent(), greenlet(second_in_state_of_caller)
            self._second.gr_context = contextvars.copy_context()
            first()
            self._first = None  # nobody is left to pass it on to
            if not self._second.dead:
                self._second.switch()
            if not ended:  # its error was caught on the way, or is one that ends a greenlet quietly
                raise RuntimeError("the second piece of work did not come to its end")

    def _end(self) -> None:
        """Of both; nothing is left to do where they came to their ends."""
        self._first = None
        if self._second is not None and not self._second.dead:
            with suppress(BaseException):  # of two errors the first one counts
                self._second.throw()  # GreenletExit: it leaves its contexts
        self._second = None

    def pass_on(self) -> None:
        """Let the other one run until it passes on or ends."""
        other = self._first if getcurrent() is self._second else self._second
        if other is None or other.dead:
            return
        restore = kept_modes()
        try:
            other.switch()
        finally:
            restore()
