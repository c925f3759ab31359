"""The two memory tiers on a GPU: ordering, failures, leaks."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from page_case import WORDS, Case, Player, TightTier

import oomb
from oomb import _C

pytestmark = pytest.mark.gpu

SCHEDULES = 1000


def stale(case: Case, player: Player | None = None) -> int:
    player = player or Player()
    manager = case.manager()
    player.play(case, manager)
    manager.close()
    return int(player.bad)


def pinned(**options: Any) -> _C.PageCopier:
    """A copy engine over 32 slots of 2 MiB in each tier."""
    return _C.PageCopier(device=0, slot_bytes=2**21, device_slots=32, host_slots=32, **options)


def test_no_stamp_is_stale_in_1000_random_schedules() -> None:
    player = Player()
    for seed in range(SCHEDULES):
        case = Case(seed, switches={"shuffle_seed": seed} if seed % 2 else {})
        manager = case.manager()
        player.play(case, manager)
        if seed % 50 == 49:
            assert int(player.bad) == 0, f"by seed {seed}"
        manager.close()
    assert int(player.bad) == 0


def test_no_stamp_is_stale_in_tight_places() -> None:
    for seed in range(100):
        assert TightTier(seed, None).hand_on_host_slot() == 0
        assert TightTier(seed, None).fetch_back_at_once() == 0
        assert TightTier(seed, None).store_over_a_store() == 0


# The other one is for what comes after a refused visit: tests/python/ops/test_refused_visits.py.
WAITS = [wait for wait in _C.page_waits() if wait != "store_after_load"]


@pytest.mark.parametrize("wait", WAITS)
def test_leaving_a_wait_out_is_noticed(wait: str) -> None:
    for seed in range(SCHEDULES):
        noticed = (
            stale(Case(seed, switches={"disabled_wait": wait}))
            + TightTier(seed, wait).hand_on_host_slot()
            + TightTier(seed, wait).fetch_back_at_once()
        )
        if noticed > 0:
            return
    pytest.fail(f"no stale stamp without {wait}")


def test_poisoned_and_shuffled_slots_change_nothing() -> None:
    for seed in range(20):
        digests = set()
        for switches in ({}, {"poison": True}, {"shuffle_seed": 3}):
            player = Player()
            assert stale(Case(seed, spin=False, switches=switches), player) == 0
            digests.add(int(player.digest))
        assert len(digests) == 1


def test_any_failing_cuda_call_leaves_everything_usable() -> None:
    case = Case(3, spin=False)  # five slots for 36 of pages, and more of kept outputs
    assert case.pieces > 0
    undisturbed = Player()
    assert stale(case, undisturbed) == 0
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    failed = 0
    for k in range(100_000):
        before = _C.cuda_calls_made()
        _C.fail_cuda_call(k)
        manager = None
        try:
            manager = case.manager()
            Player().play(case, manager)
            met = _C.cuda_calls_made() - before > k
        except oomb.Error as error:
            if "injected failure" not in str(error):
                raise
            met = True
            failed += 1
        _C.fail_cuda_call(-1)
        if not met:
            break  # the step has fewer calls than this
        torch.cuda.synchronize()  # a pending error would show here
        if manager is None:
            continue
        snapshot = json.loads(manager.snapshot())
        assert snapshot["device"]["taken_slots"] == snapshot["host"]["taken_slots"] == 0
        player = Player()
        player.play(case, manager)
        assert int(player.bad) == 0
        assert int(player.digest) == int(undisturbed.digest)
        manager.close()
    assert failed > 50
    assert torch.cuda.mem_get_info()[0] >= free - 2**21


def test_ten_thousand_chunks_leave_no_trace() -> None:
    case = Case(9, spin=False, chunks=4)  # 4 slots for 32 of pages
    manager = case.manager()
    player = Player()
    marks = []
    for _ in range(10):
        for _ in range(1000 // case.chunks):
            player.play(case, manager)
        torch.cuda.synchronize()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        snapshot = json.loads(manager.snapshot())
        marks.append(
            (
                pages * resource.getpagesize(),
                torch.cuda.mem_get_info()[0],
                snapshot["events"],
                snapshot["host"]["committed_bytes"],
            )
        )
    assert int(player.bad) == 0
    resident, free, events, pinned = zip(*marks[1:], strict=True)
    assert max(resident) - min(resident) < 4 * 2**20, resident
    assert len(set(free)) == 1, free
    assert events[-1] - events[0] <= 16, events
    assert len(set(pinned)) == 1, pinned
    manager.close()


def test_close_gives_everything_back() -> None:
    torch.cuda.synchronize()
    case = Case(3)
    stale(case)  # whatever the first use takes for good
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        stale(case)
    assert torch.cuda.mem_get_info()[0] >= free - 2**21


def test_what_was_pinned_before_a_failure_stays_and_growth_goes_on() -> None:
    copier = pinned(piece_bytes=2**21)
    for _ in range(2):
        _C.fail_cuda_call(20)  # a piece in the middle
        with pytest.raises(oomb.OutOfMemoryError, match="injected failure"):
            copier.commit_host()
        ready = copier.ready_host_bytes()
        assert 0 < ready < 32 * 2**21
        copier.commit_host()
        assert copier.ready_host_bytes() == 32 * 2**21
        copier.release_host()
        assert copier.ready_host_bytes() == 0


def test_memory_is_unmapped_between_calls() -> None:
    slots = 2**31 // (WORDS * 8)  # 2 GiB of device tier
    manager = _C.PageManager(
        device="cuda:0", slot_bytes=WORDS * 8, device_slots=slots, host_slots=0
    )
    free = torch.cuda.mem_get_info()[0]
    manager.begin_call(
        num_layers=1,
        pages_per_sequence=[slots],
        grad_slots=1,
        visits=np.zeros((0, 4), dtype=np.int32),
    )
    table_bytes = free - torch.cuda.mem_get_info()[0]
    manager.create(0, 0, slots)
    assert free - torch.cuda.mem_get_info()[0] >= 2**31
    manager.commit(0, 0, slots)
    manager.end_call()
    assert free - torch.cuda.mem_get_info()[0] <= table_bytes + 2**22
    manager.close()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer is not None, "compute-sanitizer comes with the CUDA toolkit"
    script = Path(__file__).with_name("tiers_under_sanitizer.py")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(
        [*command, _C.__file__], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all pages played" in done.stdout


def test_misuse_is_refused_clearly() -> None:
    case = Case(0)
    manager = case.manager()
    arguments = dict(
        num_layers=1,
        pages_per_sequence=[4],
        grad_slots=1,
        visits=np.zeros((0, 4), dtype=np.int32),
    )
    manager.begin_call(**arguments)
    with pytest.raises(oomb.Error, match="in use"):
        manager.begin_call(**arguments)
    manager.close()
    with pytest.raises(oomb.Error, match="closed"):
        manager.begin_call(**arguments)
    small = _C.PageManager(device="cuda:0", slot_bytes=4096, device_slots=1, host_slots=4)
    with pytest.raises(oomb.OutOfMemoryError, match="smallest device_memory that works") as caught:
        small.begin_call(
            num_layers=1,
            pages_per_sequence=[4, 4],
            grad_slots=2,
            visits=np.array([[0, 1, 0, 4]], dtype=np.int32),
        )
    assert str(6 * 4096) in str(caught.value)


def test_host_tier_larger_than_the_machine_says_what_is_free() -> None:
    copier = _C.PageCopier(
        device=0, slot_bytes=2**21, device_slots=1, host_slots=2**21, piece_bytes=2**42
    )
    with pytest.raises(oomb.OutOfMemoryError, match=r"the machine has .* available") as caught:
        copier.commit_host()
    assert caught.value.needed_bytes == 2**42
    assert 0 < caught.value.available_bytes < 2**42
