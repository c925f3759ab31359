"""A group of ranks whose last collective may never end is let go of by a thread of its own.

Gloo's destructor waits for the collectives that it has begun. One of a rank that has failed, or has
left already, does not always end with an error: Gloo loses sight of a message whose sender closes
the connection while it is on its way. The caller goes on meanwhile.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Any

_LOOK, _AT_EXIT = 0.05, 1.0  # seconds

_ending: set[threading.Thread] = set()


def let_go(group: Any) -> None:
    """Destroys a group once nobody else holds it: frames of an error do while it is handled."""
    held = [group]

    def end() -> None:
        while sys.getrefcount(held[0]) > 2:  # the list's, and that of the question
            time.sleep(_LOOK)
        _ending.add(threading.current_thread())
        held.clear()
        _ending.discard(threading.current_thread())

    threading.Thread(target=end, name="oomb-leaving", daemon=True).start()


@atexit.register
def _wait_a_moment() -> None:
    """A thread that comes back to Python while it ends would end the process with a signal."""
    deadline = time.monotonic() + _AT_EXIT
    for thread in list(_ending):
        thread.join(max(0.0, deadline - time.monotonic()))
