"""Replaces attributes for the length of a call, and always puts them back.

A model is patched while an engine runs it: forwards, the name of its attention, gradients that are
set aside. An interrupt (Ctrl-C, or what a signal handler raises) may come between any two lines,
also between a ``with`` block's end and its exit. So the undoing of each deed is registered before
it, harms nothing where the deed was not done or is undone already, and is called twice: when its
own block ends, and by :func:`as_before_afterwards`, which is around every call of an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, ExitStack, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from oomb.held_signals import with_signals_held
from oomb.model import one_call
from oomb.model.calls_at_exit import under_way
from oomb.model.modes import kept_modes

P = ParamSpec("P")
T = TypeVar("T")

_ABSENT = object()

_of_call: ContextVar[Swaps | None] = ContextVar("swaps of the call under way", default=None)


class Swaps:
    """What was replaced, and how it was before. A context manager: leaving it puts all back.

    Args:
        begin: replaces what is to be replaced when the context is entered.
    """

    def __init__(self, begin: Callable[[Swaps], None] = lambda swaps: None) -> None:
        self._begin = begin
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of a module, a config, a Python file."""
        self.replace_item(vars(owner), name, value)

    def replace_item(self, items: MutableMapping[Any, Any], key: object, value: object) -> None:
        """Set an item, which may be a new one."""
        self.keep_item(items, key)
        items[key] = value

    def keep_item(self, items: MutableMapping[Any, Any], key: object) -> None:
        """Set an item as it is now when all is put back, whoever changes it until then."""
        self.afterwards(partial(_set, items, key, items.get(key, _ABSENT)))

    def afterwards(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when all is put back, before what was registered earlier.

        It is called again where it raised, an interrupt perhaps.
        """
        self._undo.append(undo)

    def also(self, others: Swaps) -> None:
        """Do what entering ``others`` would do; it is put back with these."""
        others._begin(self)

    def put_back(self) -> None:
        """All is as before, also where some of it raises; the first error is raised at the end."""
        first: BaseException | None = None
        while self._undo:
            try:
                self._undo[-1]()
            except BaseException as error:
                first = first or error
                with suppress(Exception):  # no interrupt then; the others count as much
                    self._undo[-1]()
            self._undo.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Swaps:
        of_call = _of_call.get()
        if of_call is not None:
            of_call.afterwards(self.put_back)
        try:
            self._begin(self)
        except BaseException:
            self.put_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


def swapping(begin: Callable[Concatenate[Swaps, P], None]) -> Callable[P, Swaps]:
    """Make a context manager of a function that replaces things through its first argument."""

    @wraps(begin)
    def of(*args: P.args, **keywords: P.kwargs) -> Swaps:
        return Swaps(lambda swaps: begin(swaps, *args, **keywords))

    return of


def after_all(undo: Callable[[], object]) -> None:
    """Call ``undo`` at the end of the call, behind everything that is replaced from now on."""
    of_call = _of_call.get()
    if of_call is not None:
        of_call.afterwards(undo)


@swapping
def entered(swaps: Swaps, *contexts: AbstractContextManager[object]) -> None:
    """Contexts of others, which are left with all the rest."""
    stack = ExitStack()
    swaps.afterwards(stack.close)
    for context in contexts:
        stack.enter_context(context)


def as_before_afterwards(work: Callable[[], T], *, alone: bool = True) -> T:
    """What ``work`` returns. Whatever it has replaced is back then, and if it raises.

    torch's grad mode and autocast of this thread are part of that.

    Args:
        alone: no call may be under way, and none may begin meanwhile.

    Raises:
        Error: one is; ``work`` was not called.
    """
    swaps = Swaps()
    swaps.afterwards(partial(one_call.end, swaps))
    swaps.afterwards(kept_modes())
    swaps.afterwards(partial(_of_call.set, _of_call.get()))
    try:
        try:
            if alone:
                one_call.begin(swaps)
            swaps.replace_item(under_way, threading.get_ident(), True)
            _of_call.set(swaps)
            return work()
        finally:
            with_signals_held(swaps.put_back)
    finally:  # once more: the line above may have been interrupted itself
        with_signals_held(swaps.put_back)


def _set(items: MutableMapping[Any, Any], key: object, value: object) -> None:
    if value is _ABSENT:
        items.pop(key, None)
    else:
        items[key] = value
