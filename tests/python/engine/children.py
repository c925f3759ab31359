"""A forked process: what it does, and whether it ends."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable

SECONDS = 60  # a child that takes longer hangs


def exit_code_of_child(work: Callable[[], object]) -> int | None:
    """Of a forked process that runs ``work`` and ends as a program does; None: it hung."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return ended(child)


def ended(child: int) -> int | None:
    """Exit code of a process; None: it hung, and is gone now."""
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
