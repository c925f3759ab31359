"""When ranks write into each other's memory, and when NCCL has to carry what they send."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oomb import _C
from oomb.errors import Error
from oomb.parallel import peer_copies
from oomb.parallel.peer_copies import PeerCopies
from oomb.parallel.peers import place_of_this

MIB = 2**20


class OtherMemory:
    """Memory of a GPU in the place of the native class."""

    made: list[OtherMemory]
    refuses = hides = False

    def __init__(self, *, device: int, side_bytes: int) -> None:
        self.device, self.side_bytes, self.timed_out = device, side_bytes, False
        self.connected: list[bytes] = []
        self.sent = 0
        self.made.append(self)

    def begin(self, *, timeout_seconds: float) -> bytes:
        assert timeout_seconds == 60
        if self.hides:
            raise Error("no handle")
        return b"mine"

    def connect(self, *, rank: int, handles: list[bytes]) -> None:
        assert rank == 0
        if self.refuses:
            raise Error("no way")
        self.connected = handles

    def disconnect(self) -> None:
        self.connected = []

    def all_to_all(self, **_: Any) -> None:
        assert self.connected == [b"mine", b"theirs"]
        self.sent += 1

    def to_tokens(self, *, tensors: list[Any], results: list[Any], **_: Any) -> None:
        assert len(tensors) == len(results)
        self.sent += 1


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[OtherMemory]:
    memory: Any = type("Memory", (OtherMemory,), {"made": []})
    monkeypatch.setattr(_C, "PeerExchange", memory, raising=False)
    monkeypatch.setattr(PeerCopies, "_unused", [])
    monkeypatch.setattr(PeerCopies, "_reached", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return memory.made  # type: ignore[no-any-return]


def of_two(host: str | None = None, handle: bytes | None = b"theirs") -> PeerCopies:
    """The first of two ranks; the other says what is given."""
    here, processes, _ = place_of_this()

    def collect(work: Callable[[], Any]) -> list[Any]:
        own = work()
        if isinstance(own, tuple):
            return [own, ((host or here, processes), handle)]
        return [own, own]

    return PeerCopies(torch.device("cuda", 0), 0, 2, collect, timedelta(seconds=60))


def sends(peers: PeerCopies, num_bytes: int) -> bool:
    send, received = (torch.zeros(2 * num_bytes, dtype=torch.uint8) for _ in range(2))
    return peers.all_to_all(send, [num_bytes] * 2, received, [num_bytes] * 2, num_bytes)


def test_ranks_of_one_host_connect_once(made: list[OtherMemory]) -> None:
    peers = of_two()
    assert sends(peers, 100)
    assert sends(peers, 4 * MIB)
    assert [(one.side_bytes, one.sent) for one in made] == [(8 * MIB, 2)]


def test_larger_messages_make_room_and_the_next_group_has_it(made: list[OtherMemory]) -> None:
    peers = of_two()
    assert sends(peers, 100)
    assert sends(peers, 5 * MIB)
    assert [(one.side_bytes, one.sent) for one in made] == [(8 * MIB, 1), (16 * MIB, 1)]
    peers.close()
    assert not made[1].connected
    again = of_two()
    assert sends(again, 5 * MIB)
    assert len(made) == 2
    assert made[1].sent == 2


def test_ranks_have_equal_room_whatever_they_had_before(made: list[OtherMemory]) -> None:
    earlier = of_two()
    assert sends(earlier, 5 * MIB)
    earlier.close()
    assert sends(of_two(), 100)  # the other rank may have had no earlier group
    assert [one.side_bytes for one in made] == [16 * MIB, 8 * MIB]


def test_the_largest_messages_go_through_nccl() -> None:
    peers = of_two()
    assert not peers.has_room(129 * MIB)  # of two ranks
    assert peers.has_room(128 * MIB)


@pytest.mark.parametrize("case", ["forbidden", "other host", "other cannot", "no handle", "no way"])
def test_all_ranks_use_nccl_where_one_cannot_reach(
    made: list[OtherMemory], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "forbidden":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    if case == "no way":
        monkeypatch.setattr(peer_copies._C.PeerExchange, "refuses", True)
    if case == "no handle":
        monkeypatch.setattr(peer_copies._C.PeerExchange, "hides", True)
    peers = of_two(
        host="another" if case == "other host" else None,
        handle=None if case == "other cannot" else b"theirs",
    )
    assert not sends(peers, 100)
    assert not sends(peers, 100)
    assert all(one.sent == 0 for one in made)
    assert len(made) == (case != "forbidden")


@pytest.mark.parametrize(("ranks", "taken"), [(8, True), (10, True), (11, False)])
def test_kernels_move_the_heads_of_up_to_ten_ranks(
    made: list[OtherMemory], ranks: int, taken: bool
) -> None:
    """Three tensors to and from each: gradients of queries, keys and values."""

    def collect(work: Callable[[], Any]) -> list[Any]:
        return [work()] * ranks

    peers = PeerCopies(torch.device("cuda", 0), 0, ranks, collect, timedelta(seconds=60))
    tensors = tuple(torch.zeros(1, 1, ranks, 8) for _ in range(3))
    results = [torch.zeros(1, ranks, 1, 8) for _ in range(3)]
    assert peers.to_tokens(tensors, [1] * ranks, 3 * 8, results) == taken
    assert sum(one.sent for one in made) == taken


def test_a_wait_that_took_too_long_is_told(made: list[OtherMemory]) -> None:
    peers = of_two()
    assert sends(peers, 100)
    made[0].timed_out = True
    with pytest.raises(TimeoutError, match="no answer within 0:01:00"):
        sends(peers, 100)


def test_more_ranks_than_kernels_know_use_nccl() -> None:
    peers = PeerCopies(torch.device("cuda", 0), 0, 17, lambda work: [work()] * 17, timedelta(1))
    assert not peers.has_room(16)
