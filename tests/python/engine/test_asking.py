"""Another thread asks a page manager how a call is going, while the call runs."""

from __future__ import annotations

import subprocess
import sys

# Calls of many visits and of few: what is counted per visit gets memory anew. In a process of its
# own, as reading what another thread frees ends in an abort more often than in a wrong number.
_PROGRAM = """
import threading

import numpy as np

from oomb import _C

visits = [np.tile(np.int32([0, 0, 0, 4]), (100_000 * k, 1)) for k in (1, 3, 2, 4, 1, 5)]
manager = _C.PageManager(device="cpu", slot_bytes=64, device_slots=8, host_slots=64)
over = threading.Event()
wrong, rounds = [], []


def ask():
    known = {0} | {len(rows) for rows in visits}
    try:
        while not over.is_set():
            manager.stats()
            waits = manager.waits()
            if waits.shape[1] not in known or waits.any():
                wrong.append(waits.shape)
            rounds.append(waits.shape)
    except BaseException as error:
        wrong.append(repr(error))


askers = [threading.Thread(target=ask) for _ in range(2)]
for asker in askers:
    asker.start()
for rows in visits * 4:
    manager.begin_call(num_layers=1, pages_per_sequence=[4], grad_slots=1, visits=rows)
    manager.end_call()
over.set()
for asker in askers:
    asker.join()
assert not wrong, wrong
assert rounds
"""


def test_stats_and_waits_from_another_thread() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
