"""Calls of daemon threads end before the interpreter does.

Python (before 3.14) ends a thread that comes back from a kernel to an interpreter that is no more
by unwinding its stack, and the C++ libraries on it end the process instead: ``terminate called
without an active exception``. So a call that is under way when the program ends is stopped by
SystemExit, which leaves a thread without a word, and waited for.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time

_SECONDS = 10.0  # longer than a kernel takes on a CPU

under_way: dict[int, bool] = {}  # threads that are in a call, by their ident


def _end() -> None:
    ends = time.monotonic() + _SECONDS
    asked: set[int] = set()
    while others := set(under_way) - {threading.get_ident()}:
        for thread in others - asked:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(SystemExit)
            )
        asked |= others
        if time.monotonic() > ends:
            return
        time.sleep(0.005)


atexit.register(_end)
os.register_at_fork(after_in_child=under_way.clear)  # other threads stay with the parent
