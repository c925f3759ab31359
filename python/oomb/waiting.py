"""Threads that wait for work sleep, instead of spinning on cores that others need."""

from __future__ import annotations

import os
import sys

# Who has set one of these has chosen; OpenMP's runtimes read them once, when torch loads them.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_asleep() -> None:
    """Set ``OMP_WAIT_POLICY=passive``, unless torch is loaded already or the user has chosen.

    While attention runs in threads of its own, those of torch wait. Spinning, they would take the
    cores from it, and several times as long where cores are shared with other processes.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _CHOICES):
        os.environ["OMP_WAIT_POLICY"] = "passive"
