"""Sums beside other work: what they take, and that products get their multiprocessors back."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oomb.parallel import peer_sums
from oomb.parallel.peer_copies import PeerCopies
from oomb.parallel.peer_sums import PeerSums

DEVICE = torch.device("cuda", 0)


class OtherCopies:
    """Of two ranks with equal tensors, in the place of copies between GPUs."""

    adds_up = staticmethod(PeerCopies.adds_up)

    def __init__(self, *, room: bool = True) -> None:
        self.room = room
        self.closed = 0

    def has_room(self, message_bytes: int) -> bool:
        assert message_bytes == 32 * 2**20
        return self.room

    def add_up(self, flat: torch.Tensor, blocks: int) -> bool:
        assert blocks == 16
        assert flat.data_ptr() % 16 == 0
        if flat.numel() == 0:
            return False
        flat.mul_(2)
        return True

    def expect_in_time(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often products left multiprocessors to others, and took them back."""
    counts = [0, 0]

    def leave(_: torch.device) -> Any:
        counts[0] += 1
        return lambda: counts.__setitem__(1, counts[1] + 1)

    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(peer_sums, "leave_processors", leave)
    monkeypatch.setattr(peer_sums, "processors_left", lambda _: 8)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(PeerSums, "_streams", {})
    return counts


def sums_through(copies: OtherCopies) -> PeerSums:
    return PeerSums(DEVICE, 2, copies)  # type: ignore[arg-type]


def test_products_get_their_multiprocessors_back_once(left: list[int]) -> None:
    sums = sums_through(OtherCopies())
    tensors = [torch.ones(5), torch.ones(7, dtype=torch.bfloat16)]
    sums.join()  # nothing has begun
    assert left == [0, 0]
    assert sums.begin(tensors[:1])
    assert sums.begin(tensors[1:])
    assert left == [1, 0]
    sums.join()
    sums.join()
    assert left == [1, 1]
    assert all(bool((x == 2).all()) for x in tensors)
    assert sums.begin(tensors)
    assert left == [2, 1]


def test_after_a_failure_too(left: list[int]) -> None:
    copies = OtherCopies()
    sums = sums_through(copies)
    assert sums.begin([torch.ones(5)])
    sums.close()
    assert left == [1, 1]
    assert copies.closed == 1


@pytest.mark.parametrize(
    ("dtype", "first", "room"),
    [
        (torch.float64, 0, True),
        (torch.float32, 0, False),
        (torch.float32, 0, True),
        (torch.float32, 1, True),
    ],
    ids=["fp64", "no room", "taken", "between words"],
)
def test_what_copies_do_not_take_is_left_as_it_is(
    dtype: torch.dtype, first: int, room: bool, left: list[int]
) -> None:
    x = torch.ones(8 + first, dtype=dtype)[first:]
    tensors = [x, torch.ones(0)]
    taken = dtype == torch.float32 and room
    assert sums_through(OtherCopies(room=room)).begin(tensors) == taken
    assert bool((x == (2 if taken else 1)).all())
    assert left == [int(taken), 0]
