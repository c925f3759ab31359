"""Where the thread that drives a step spends its time: its Python stack, looked at every moment."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType


@dataclass
class HostSamples:
    """Looks at the stack of the thread that made it.

    A function that holds Python's lock for long is seen once it has let go, so native code that
    keeps it counts for the line behind it.

    Args:
        seconds: between looks.

    Attributes:
        spent: seconds inside :meth:`looking`.
        taken: number of looks.
        inside: looks at which a function was under way, by function.
        at: looks at which a line was the innermost, by line.
    """

    seconds: float = 0.001
    spent: float = 0.0
    taken: int = 0
    inside: Counter[str] = field(default_factory=Counter)
    at: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Looks while inside."""
        over, watched = threading.Event(), threading.get_ident()

        def look() -> None:
            while not over.wait(self.seconds):
                frame = sys._current_frames().get(watched)
                if frame is not None:
                    self._take(frame)

        thread = threading.Thread(target=look, daemon=True)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(self.seconds / 4)  # how long the watched thread may keep the lock
        thread.start()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent = time.perf_counter() - began
            over.set()
            thread.join()
            sys.setswitchinterval(interval)

    def _take(self, innermost: FrameType) -> None:
        self.taken += 1
        code = innermost.f_code
        self.at[f"{_place(innermost)}:{innermost.f_lineno} {code.co_name}"] += 1
        seen = set()
        frame: FrameType | None = innermost
        while frame is not None:
            seen.add(f"{_place(frame)} {frame.f_code.co_name}")
            frame = frame.f_back
        self.inside.update(seen)

    def lines(self, number: int) -> list[str]:
        """The functions that took longest, then the lines, with their shares."""
        found = []
        for title, counts in (("inside", self.inside), ("at", self.at)):
            found.append(f"host, {title}, {self.taken} looks:")
            for name, count in counts.most_common(number):
                found.append(f"{100 * count / max(self.taken, 1):6.1f} %  {name}")
        return found


def _place(frame: FrameType) -> str:
    return "/".join(Path(frame.f_code.co_filename).parts[-3:])
