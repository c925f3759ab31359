"""Ranks that connect: one fails to, has ended, or does not come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

import oomb
from oomb.parallel import group, own_groups
from oomb.parallel.failure import RankLostError
from oomb.parallel.group import Ranks

from .world import Died, World

RANKS = 3
LONG = 60.0  # an answer that comes by itself comes long before
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    with World(RANKS) as world:
        yield world


def failing(rank: int) -> tuple[str, float]:
    """What each rank raises where one of them has no room while it connects; then all connect."""

    def no_room(*_: Any) -> Any:
        raise oomb.OutOfMemoryError("no room", needed_bytes=2, available_bytes=1)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_groups, "_CONNECTS", timedelta(seconds=2))
        if rank == 1:
            patch.setattr(dist, "ProcessGroupGloo", no_room)
        with pytest.raises(oomb.OutOfMemoryError) as found:
            Ranks(list(range(RANKS)), CPU, timedelta(seconds=LONG))
    seconds = time.monotonic() - began
    again = Ranks(list(range(RANKS)), CPU)
    assert again.collect(lambda: rank) == list(range(RANKS))
    again.close()
    return str(found.value), seconds


def test_an_error_of_one_rank_is_raised_by_all(three: World) -> None:
    answers = three.run(failing)
    assert len({text for text, _ in answers}) == 1 and "[rank 1]" in answers[0][0]
    assert max(seconds for _, seconds in answers) < LONG / 2


def waiting(rank: int, seconds: float) -> str:
    if rank == 1:
        return ""
    with pytest.raises(RankLostError) as found:
        Ranks(list(range(RANKS)), CPU, timedelta(seconds=seconds))
    return str(found.value)


def test_a_rank_that_does_not_come_is_named(three: World) -> None:
    for rank, text in enumerate(three.run(waiting, 1.0)):
        assert rank == 1 or f"[rank {rank}] expected ranks [0, 1, 2] to connect" in text
        assert rank == 1 or text.endswith("got none of [1]")


def ends(rank: int) -> str:
    """The last one has connected once."""
    Ranks(list(range(RANKS)), CPU).close()
    if rank == 2:
        os._exit(1)
    with pytest.raises(RankLostError) as found:
        Ranks(list(range(RANKS)), CPU, timedelta(seconds=LONG))
    return str(found.value)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    with World(RANKS) as world:
        *answers, last = world.run(ends)
        assert isinstance(last, Died)
        assert all("rank 2 has ended" in text for text in answers)


def failing_on_its_gpu(rank: int) -> list[tuple[str, float]]:
    """A rank whose GPU does not connect: at first, and in a call after one that failed. Nothing is
    sent through NCCL's groups here, so something else stands for them."""
    fails, gpu, found = [True], torch.device("cuda", 0), list[tuple[str, float]]()

    def connect(name: str, place: int, members: list[int], timeout: timedelta) -> Any:
        if rank == 1 and fails[0]:
            raise dist.DistBackendError("NCCL error: unhandled system error")
        unused = SimpleNamespace(abort=lambda: None)
        return unused, unused

    def met(connecting: Any) -> None:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError if rank == 1 else oomb.Error) as error:
            connecting()
        found.append((str(error.value), time.monotonic() - began))

    def give_up() -> None:
        with ranks.call():
            ranks.collect(lambda: None)
            if rank == 2:
                raise ValueError("gives up")
            ranks.collect(lambda: None)

    def call() -> None:
        with ranks.call():
            ranks.collect(lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "on_gpus", connect)
        met(lambda: Ranks(list(range(RANKS)), gpu, timedelta(seconds=LONG)))
        fails[0] = False
        ranks = Ranks(list(range(RANKS)), gpu, timedelta(seconds=LONG))
        with pytest.raises(ValueError, match="gives up"):
            give_up()
        fails[0] = True
        met(call)
        fails[0] = False
        with ranks.call():
            assert ranks.collect(lambda: rank) == list(range(RANKS))
    return found


def test_a_gpu_that_does_not_connect_is_named_by_all() -> None:
    with World(RANKS) as world:
        found = world.run(failing_on_its_gpu)
    for answers in zip(*found, strict=True):
        of_rank_0, own, of_rank_2 = (text for text, _ in answers)
        assert own == "NCCL error: unhandled system error"
        assert of_rank_0 == of_rank_2 == f"[rank 1] DistBackendError: {own}"
        assert max(seconds for _, seconds in answers) < LONG / 12
