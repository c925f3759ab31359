"""Which heads each rank of a sequence holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oomb.parallel.in_order import added_in_order

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

    def put_queries(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """[B, query heads, tokens, D] into [ranks, tokens, B, queries, D]."""
        heads = x.unflatten(1, (self.groups, self.keys, self.of_key))
        for place, (first, last) in self._places(room):
            part = heads[:, :, :, first:last].permute(1, 4, 0, 2, 3, 5)
            copy_heads(place[..., : last - first, :], part)
            place[..., last - first :, :].zero_()

    def put_keys(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """[B, key/value heads, tokens, D] into [ranks, tokens, B, keys, D]."""
        heads = x.unflatten(1, (self.groups, self.keys)).permute(1, 3, 0, 2, 4)
        copy_heads(room.unflatten(0, (self.groups, self.copies)), heads[:, None])

    def take_queries(self, room: torch.Tensor, parts: torch.Tensor) -> None:
        """[ranks, tokens, B, queries, D] into [B, tokens, query heads, D]."""
        heads = room.unflatten(2, (self.groups, self.keys, self.of_key))
        for place, (first, last) in self._places(parts):
            part = place[..., : last - first, :].permute(2, 1, 0, 3, 4, 5)
            copy_heads(heads[:, :, :, :, first:last], part)

    def take_keys(self, room: torch.Tensor, parts: torch.Tensor) -> None:
        """[ranks, tokens, B, keys, D] into [B, tokens, key/value heads, D]: sums over copies, in
        their order."""
        of_groups = parts.unflatten(0, (self.groups, self.copies))
        total = of_groups[:, 0] if self.copies == 1 else added_in_order(of_groups.unbind(1))
        heads = room.unflatten(2, (self.groups, self.keys))
        copy_heads(heads, total.permute(2, 1, 0, 3, 4))

    def _places(self, parts: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
        """Of each copy: its [groups, tokens, B, keys, width, D], and its queries of a key."""
        of_copies = parts.unflatten(0, (self.groups, self.copies))
        for copy in range(self.copies):
            yield of_copies[:, copy].unflatten(3, (self.keys, self.width)), self.part(copy)

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
