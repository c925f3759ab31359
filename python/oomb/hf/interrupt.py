"""SIGTERM and SIGINT during training: noticed now, acted on at the next chunk border."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from oomb.held_signals import restore_handlers
from oomb.parallel.failure import raise_alike


class Interrupted(SystemExit):
    """Training ended early on SIGTERM or SIGINT. Uncaught, the process ends with exit code 0.

    The optimizer step under way was abandoned; the model is that of the last finished step.

    Attributes:
        reason: ``"SIGTERM"`` or ``"SIGINT"``.
        step: the last finished optimizer step.
        checkpoint: where it is saved; None: it is not (``save_strategy="no"``).
    """

    def __init__(self, reason: str, step: int = 0, checkpoint: Path | None = None) -> None:
        super().__init__(0)
        self.reason = reason
        self.step = step
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        saved = f"saved in {self.checkpoint}" if self.checkpoint else "not saved"
        return (
            f"{self.reason}: the step under way was abandoned; step {self.step}, the last finished "
            f"one, is {saved}"
        )


def _of_rank(text: str) -> Interrupted:
    """What stops a rank stops all: "[rank 1] SIGTERM: …"."""
    return Interrupted(text.partition("] ")[2].partition(":")[0])


raise_alike(Interrupted, _of_rank)


class SignalWatch:
    """While active, the first SIGTERM or SIGINT is only remembered; :meth:`check` raises it.

    A second SIGINT raises KeyboardInterrupt at once. Outside the main thread, where Python allows
    no handlers, signals act as they did; so does one whose handler is not Python's, in a program
    that embeds it, since nobody could set it again.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raise :class:`Interrupted` if a signal came."""
        if self.received is not None:
            raise Interrupted(self.received)

    def __enter__(self) -> SignalWatch:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
            self._previous = {n: handler for n, handler in before.items() if handler is not None}
            try:
                for number in self._previous:
                    signal.signal(number, self._receive)
            except BaseException:  # a signal that came between the two
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        restore_handlers(self._previous)
        self._previous, self.received = {}, None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
