"""Processes of a job that have ended, as their neighbours on a host see it.

Collectives on GPUs do not notice that a process is gone, and torchrun lets the others have half a
minute. Here they know within a second.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Place = tuple[str, str, int]

_BOOT = "/proc/sys/kernel/random/boot_id"  # of a host; names and process spaces may be alike on two
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 2.0  # in which a rank that is not blocked says by itself what happened


def place_of_this() -> Place:
    """Host, space of process numbers, number of this process."""
    host, space = socket.gethostname(), ""
    with suppress(OSError), open(_BOOT) as file:
        host = file.read()
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return host, space, os.getpid()


def first_ended(places: list[Place]) -> int | None:
    """Index of a process that has ended; None: none that can be seen from here has."""
    *here, _ = place_of_this()
    for index, (*there, number) in enumerate(places):
        if there == here and _has_ended(number):
            return index
    return None


def _has_ended(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:  # ended, and nobody has asked for its exit code yet
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


@contextmanager
def ending_with(places: list[Place], say: Callable[[str], None]) -> Iterator[None]:
    """This process ends, with exit code 1, soon after another has; for a program, not a library.

    Args:
        places: of the processes of the job.
        say: gets one line before the end.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            rank = first_ended(places)
            if rank is not None:
                if not over.wait(_GRACE_SECONDS):
                    with suppress(Exception):
                        say(f"rank {rank} has ended; --resume goes on from the last checkpoint")
                        sys.stderr.flush()
                    os._exit(1)
                return

    thread = threading.Thread(target=watch, name="oomb peers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
