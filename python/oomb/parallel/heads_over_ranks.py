"""The placement of a sequence over ranks: heads of the past, slices of each chunk's tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from oomb.parallel.agreement import expect_own_device, expect_same
from oomb.parallel.exchange import KnownOutput, ToHeads, ToTokens, ToWhole
from oomb.parallel.group import Ranks
from oomb.parallel.heads import HeadShares
from oomb.parallel.list_parts import of_all_heads
from oomb.parallel.placement import Attended, Lists, Placement, T
from oomb.parallel.slices import TokenSlices
from oomb.parallel.sums import sum_in_rank_order


@dataclass(frozen=True)
class HeadsOverRanks(Placement):
    """A rank runs a slice of each chunk's tokens and holds the past of its share of the heads.

    Args:
        group: the ranks of the sequence.
    """

    group: Ranks
    rank: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", self.group.rank)
        object.__setattr__(self, "ranks", self.group.size)

    @property
    def neighbours(self) -> int:
        """Processes that share this host's memory."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))

    def expect_device(self, device: torch.device) -> None:
        group = self.group
        expect_own_device(group.collect, group.members, group.device, device)

    def close(self) -> None:
        self.group.close()

    def slices(self, begin: int, end: int) -> TokenSlices:
        return TokenSlices(begin, end, self.ranks, self.rank)

    def call(self) -> AbstractContextManager[None]:
        return self.group.call()

    def expect_same(self, texts: Callable[[], dict[str, str]]) -> None:
        expect_same(self.group.collect(texts), self.group.members)

    def collect(self, work: Callable[[], T]) -> list[T]:
        return self.group.collect(work)

    def together(self, work: Callable[[], T]) -> T:
        return self.group.together(work)

    def settle(self, work: Callable[[], object]) -> None:
        self.group.settle(work)

    def border(self) -> None:
        self.group.border()

    def heads(self, query_heads: int, kv_heads: int) -> HeadShares:
        return HeadShares(query_heads, kv_heads, self.ranks)

    def to_heads(self, tensors: Attended, slices: TokenSlices, shares: HeadShares) -> Attended:
        exchanged: Attended = ToHeads.apply(self.group, slices, shares, *tensors)  # type: ignore[no-untyped-call]
        return exchanged

    def to_tokens(self, o: torch.Tensor, slices: TokenSlices, shares: HeadShares) -> torch.Tensor:
        (exchanged,) = ToTokens.apply(self.group, slices, shares, o)  # type: ignore[no-untyped-call]
        return exchanged  # type: ignore[no-any-return]

    def known_output(
        self,
        tensors: Attended,
        backward: Callable[..., Attended],
        slices: TokenSlices,
        shares: HeadShares,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = KnownOutput.apply(self.group, slices, shares, backward, *tensors)  # type: ignore[no-untyped-call]
        return o, lse

    def to_whole(self, x: torch.Tensor, slices: TokenSlices) -> torch.Tensor:
        whole: torch.Tensor = ToWhole.apply(self.group, slices, x)  # type: ignore[no-untyped-call]
        return whole

    def of_heads(self, per_head: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return shares.of_rank(per_head, self.rank)

    def queries_of_keys(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        if shares.copies == 1:
            return q
        sent, sizes = q.contiguous().view(-1).repeat(shares.copies), self._sizes(q, shares)
        received = self.group.all_to_all(sent, sizes, sizes, q.numel())
        return shares.together(received.view(shares.copies, *q.shape))

    def parts_of_queries(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        parts = shares.apart(x)
        sizes = self._sizes(parts[0], shares)
        return self.group.all_to_all(parts.view(-1), sizes, sizes, parts[0].numel()).view(
            parts.shape
        )

    def _sizes(self, message: torch.Tensor, shares: HeadShares) -> list[int]:
        """Of messages to each rank, where those that hold copies of a head get one each."""
        group = self.rank // shares.copies
        return [message.numel() * (rank // shares.copies == group) for rank in range(self.ranks)]

    def whole_queries(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        groups = self.group.all_gather(q).unflatten(0, (shares.groups, shares.copies))
        return torch.cat([shares.together(of_group) for of_group in groups], dim=1)

    def whole_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return torch.cat(list(self.group.all_gather(x)[:: shares.copies]), dim=2)

    def of_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        first = self.total(x if self.rank == 0 else torch.zeros_like(x))
        if x.shape[2] != shares.kv_heads:
            return first
        return first.chunk(shares.groups, dim=2)[self.rank // shares.copies].contiguous()

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.sum(x)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(x).amax(dim=0)

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        sum_in_rank_order(self.group, tensors)

    def sum_beside(self, tensors: list[torch.Tensor]) -> None:
        sums = self.group.sums
        if sums is None or not sums.begin(tensors):
            self.sum_(tensors)

    def finish_sums(self) -> None:
        if self.group.sums is not None:
            with self.group.measured():
                self.group.sums.join()

    def whole_lists(self, lists: Lists, copies: int, *, per_head: bool, parted: bool) -> Lists:
        every = self.group.collect(lambda: lists)
        if not per_head:
            every = every[:copies]
        return [
            [
                None if of_ranks[0] is None else of_all_heads(of_ranks, copies, parted=parted)
                for of_ranks in zip(*of_layer, strict=True)
            ]
            for of_layer in zip(*every, strict=True)
        ]

    def measure_with(self, stopwatch: Any) -> None:
        self.group.stopwatch = stopwatch

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        self.group.meanwhile = work
