"""Signals wait while a few lines run that must not be torn apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any


def with_signals_held(work: Callable[[], object]) -> None:
    """Run ``work``; what handlers in Python would do in the middle of it, they do afterwards.

    Outside the main thread, which alone runs handlers, there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    handlers = {number: handler for number, handler in _handlers().items() if callable(handler)}
    arrived: list[int] = []
    try:
        try:
            for number in handlers:
                signal.signal(number, lambda number, _: arrived.append(number))
            work()
        finally:
            restore_handlers(handlers)
    finally:  # once more: the line above may have been interrupted itself
        restore_handlers(handlers)
        _deliver(arrived)


def restore_handlers(handlers: Mapping[int, Any]) -> None:
    """Set handlers as :func:`signal.getsignal` gave them."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _deliver(numbers: list[int]) -> None:
    """Each of them, also where the handler of an earlier one raises."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _deliver(numbers)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}
