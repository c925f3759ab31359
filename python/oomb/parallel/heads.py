"""Which heads each rank of a sequence holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

_WIDE = torch.complex128  # 16 bytes, the most that a thread of a GPU moves at once


@dataclass(frozen=True)
class HeadShares:
    """Groups of ranks divide the key/value heads; the ranks of a group divide the queries of each.

    8 ranks, 4 key/value heads with 7 queries each: 4 groups of 2 ranks, which hold copies.

        rank               0             1             2             3           …
        keys and values    0             0             1             1
        queries            0 1 2 –       3 4 5 6       7 8 9 –       10 11 12 13

    All ranks have as many heads: zeros stand where one has a query less (–). They cost no time,
    since ranks wait for one another, and no kernel has to know.

    Args:
        query_heads, kv_heads: of the model.
    """

    query_heads: int
    kv_heads: int
    ranks: int

    @property
    def groups(self) -> int:
        return math.gcd(self.ranks, self.kv_heads)

    @property
    def copies(self) -> int:
        """Ranks that hold the same keys and values: neighbours."""
        return self.ranks // self.groups

    @property
    def keys(self) -> int:
        """Key/value heads of a rank."""
        return self.kv_heads // self.groups

    def keys_of(self, rank: int) -> tuple[int, int]:
        """Key/value heads [first, last) of a rank."""
        first = rank // self.copies * self.keys
        return first, first + self.keys

    @property
    def of_key(self) -> int:
        """Queries of a key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def width(self) -> int:
        """Queries of a key/value head that a rank has, zeros among them."""
        return -(-self.of_key // self.copies)

    @property
    def queries(self) -> int:
        """Query heads of a rank, zeros among them."""
        return self.keys * self.width

    @property
    def fits(self) -> bool:
        """Whether each rank has a query of each of its keys."""
        return self.of_key >= self.copies

    def part(self, copy: int) -> tuple[int, int]:
        """Queries [first, last) of each key/value head that a copy has."""
        bounds = [self.of_key * i // self.copies for i in (copy, copy + 1)]
        return bounds[0], bounds[1]

    @property
    def fills(self) -> bool:
        """Whether some rank has zeros in place of a query."""
        return self.of_key % self.copies != 0

    def head_of(self, rank: int, place: int) -> int:
        """The model's query head at a place of a rank's; -1: zeros."""
        (first, last), (key, query) = self.part(rank % self.copies), divmod(place, self.width)
        missing = first + query >= last
        return -1 if missing else (self.keys_of(rank)[0] + key) * self.of_key + first + query

    def of_rank(self, per_head: torch.Tensor, rank: int) -> torch.Tensor:
        """[query heads, …] → [queries, …] of a rank, with its zeros."""
        group, copy = divmod(rank, self.copies)
        first, last = self.part(copy)
        whole = per_head.unflatten(0, (self.groups, self.keys, self.of_key))
        own: torch.Tensor = whole[group, :, first:last]
        if last - first < self.width:
            zeros = own.new_zeros(self.keys, self.width - (last - first), *own.shape[2:])
            own = torch.cat([own, zeros], dim=1)
        return own.flatten(0, 1)

    def together(self, of_copies: torch.Tensor) -> torch.Tensor:
        """[copies, B, queries, tokens, …] of a group → [B, queries of its keys, tokens, …]."""
        parts = []
        for copy, queries in enumerate(of_copies.unflatten(2, (self.keys, self.width))):
            first, last = self.part(copy)
            parts.append(queries[:, :, : last - first])
        return torch.cat(parts, dim=2).flatten(1, 2)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """The way back of :meth:`together`, with the zeros of each copy."""
        heads = x.unflatten(1, (self.keys, self.of_key))
        parts = x.new_zeros(self.copies, x.shape[0], self.keys, self.width, *x.shape[2:])
        for copy, room in enumerate(parts):
            first, last = self.part(copy)
            copy_heads(room[:, :, : last - first], heads[:, :, first:last])
        return parts.flatten(2, 3)


Places = tuple[int, ...]


@lru_cache(maxsize=64)
def sent_heads(shares: HeadShares, others: int) -> Places:
    """[ranks * heads of a message]: which head of a model goes where in the messages.

    Heads are numbered through the tensors that are sent: queries, then ``others`` tensors of keys
    or values, then one of zeros.
    """
    number = [shares.query_heads + i * shares.kv_heads for i in range(others + 1)]
    places: list[int] = []
    for rank in range(shares.ranks):
        own = [shares.head_of(rank, place) for place in range(shares.queries)]
        places += [head if head >= 0 else number[-1] for head in own]
        for before in number[:-1]:
            places += range(before + shares.keys_of(rank)[0], before + shares.keys_of(rank)[1])
    return tuple(places)


@lru_cache(maxsize=64)
def received_heads(shares: HeadShares, others: int) -> tuple[Places, list[list[Places]]]:
    """Places of the model's heads among those of all ranks' messages, which are made likewise.

    Returns:
        Those of queries, [query heads]; and for each of the other tensors those of every copy of
        its heads, [kv_heads].
    """
    width = shares.queries + others * shares.keys
    queries = [-1] * shares.query_heads
    for rank in range(shares.ranks):
        for place in range(shares.queries):
            if (head := shares.head_of(rank, place)) >= 0:
                queries[head] = rank * width + place

    def of_copy(other: int, copy: int) -> Places:
        before = shares.queries + other * shares.keys
        ranks = (head // shares.keys * shares.copies + copy for head in range(shares.kv_heads))
        return tuple(rank * width + before + i % shares.keys for i, rank in enumerate(ranks))

    keys = [[of_copy(other, copy) for copy in range(shares.copies)] for other in range(others)]
    return tuple(queries), keys


def picked(x: torch.Tensor, places: Places) -> torch.Tensor:
    """Heads of [..., ..., heads, D] at some places. On a GPU the places are copied there once."""
    # A fake tensor of a plan is nothing that a call may find later.
    made = _index if type(x) is torch.Tensor else _index.__wrapped__
    return x.index_select(2, made(places, x.device))


@lru_cache(maxsize=256)
def _index(places: Places, device: torch.device) -> torch.Tensor:
    return torch.tensor(places, device=device)


def in_pieces(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors [..., D] in pieces of 16 bytes where all their heads consist of such.

    What only moves heads then moves as much at a time as a GPU's thread can.
    """
    whole = all(_in_pieces(x) for x in tensors)
    return [x.view(_WIDE) for x in tensors] if whole else list(tensors)


def copy_heads(room: torch.Tensor, x: torch.Tensor) -> None:
    """``room.copy_(x)`` for tensors [..., D] whose order of axes differs.

    Heads are moved in pieces of 16 bytes where they consist of such: torch's copy between orders
    moves one element at a time, however small.
    """
    if room.dtype == x.dtype and _in_pieces(room) and _in_pieces(x):
        room, x = room.view(_WIDE), x.view(_WIDE)
    room.copy_(x)


def _in_pieces(x: torch.Tensor) -> bool:
    """Whether its heads begin and end between pieces."""
    size = _WIDE.itemsize // x.element_size()
    numbers = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    return x.numel() > 0 and x.stride(-1) == 1 and all(n % size == 0 for n in numbers)
