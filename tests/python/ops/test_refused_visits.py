"""Pages after a visit that the device tier could not hold, on a CPU whose copies are late."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import oomb
from oomb import _C

SLOT_BYTES, DEVICE_SLOTS, PAGES = 2**16, 64, 300
READ, HELD, TOO_LARGE, SMALL = 0, 2, 3, 4
VISITS = [
    *((0, PAGES), (200, 264)),  # all; then some that are dropped
    (0, 56),  # held, while 8 pages of the next visit are loaded ahead
    (100, 200),  # more than there is room for beside it
    (60, 100),
    *((0, 60), (100, 200), (0, 200)),  # all that is left
]


def wrong_pages(seed: int, *, refused: bool, **switches: Any) -> list[int]:
    """Pages that hold other bytes than were written, in visits after one that was refused."""
    manager = _C.PageManager(
        device="cpu",
        slot_bytes=SLOT_BYTES,
        device_slots=DEVICE_SLOTS,
        host_slots=2 * PAGES,
        shuffle_seed=seed,
        copy_delay_seed=seed,
        **switches,
    )
    visits = np.array([(0, 0, *pages) for pages in VISITS], np.int32)
    manager.begin_call(num_layers=1, pages_per_sequence=[PAGES], grad_slots=1, visits=visits)
    table = manager.block_table(0)
    wrong: list[int] = []

    def memory(page: int) -> Any:
        address = manager.pool_address() + int(table[0, page]) * SLOT_BYTES
        return np.ctypeslib.as_array((ctypes.c_uint8 * SLOT_BYTES).from_address(address))

    def value(page: int) -> int:
        return page % 251 + 1

    def read(visit: int) -> None:
        for begin, end in manager.waves(visit):
            manager.acquire(visit, begin, end)
            wrong.extend(p for p in range(begin, end) if (memory(p) != value(p)).any())
            manager.release(visit, begin, end)

    for page in range(PAGES):
        manager.create(0, page, page + 1)
        memory(page)[:] = value(page)
        manager.commit(0, page, page + 1)
    read(READ)
    read(READ + 1)
    manager.drop(0, 200, PAGES)
    manager.acquire(HELD, *VISITS[HELD])
    if refused:
        with pytest.raises(oomb.OutOfMemoryError):
            manager.acquire(TOO_LARGE, *VISITS[TOO_LARGE])
    manager.release(HELD, *VISITS[HELD])
    few = VISITS[SMALL][0], VISITS[SMALL][0] + 1 + seed % 3
    manager.acquire(SMALL, *few)
    manager.release(SMALL, *few)
    for visit in range(SMALL + 1, len(VISITS)):
        read(visit)
    manager.end_call()
    manager.close()
    return wrong


@pytest.mark.parametrize("refused", [False, True], ids=["held", "refused"])
def test_pages_are_what_was_written(refused: bool) -> None:
    for seed in range(1, 9):
        assert wrong_pages(seed, refused=refused) == []


def test_leaving_out_the_wait_for_loads_is_noticed() -> None:
    """A page that was on its way is stored as its slot was before."""
    for seed in range(1, 21):
        if wrong_pages(seed, refused=True, disabled_wait="store_after_load"):
            return
    pytest.fail("20 delays without the wait changed nothing")
