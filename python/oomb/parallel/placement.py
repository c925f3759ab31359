"""Which rank holds which part of a layer's past, and runs which tokens of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from oomb.parallel.agreement import expect_own_device, expect_same
from oomb.parallel.exchange import ToHeads, ToTokens, ToWhole
from oomb.parallel.group import Ranks
from oomb.parallel.heads import HeadShares
from oomb.parallel.list_parts import joined
from oomb.parallel.slices import TokenSlices
from oomb.parallel.sums import sum_in_rank_order

T = TypeVar("T")
Attended = tuple[torch.Tensor, ...]
Lists = list[list[torch.Tensor | None]]


class Placement(Protocol):
    """How a call is spread over ranks.

    Attributes:
        rank: of this process among those of the sequence.
        ranks: their number.
        neighbours: processes that share this host's memory.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def neighbours(self) -> int: ...

    def slices(self, begin: int, end: int) -> TokenSlices:
        """Who runs which of the tokens [begin, end) of a chunk."""
        ...

    def expect_device(self, device: torch.device) -> None:
        """Raise unless a model's device is one that ranks can be on."""
        ...

    def close(self) -> None:
        """No call will come."""
        ...

    def call(self) -> AbstractContextManager[None]:
        """Around a call: an error of one rank inside is raised by all."""
        ...

    def expect_same(self, texts: Callable[[], dict[str, str]]) -> None:
        """Raise a ValueError unless all ranks say the same of each argument.

        Args:
            texts: what this rank says; its own error is raised by all.
        """
        ...

    def collect(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returned on each rank; an error of one is raised by all."""
        ...

    def together(self, work: Callable[[], T]) -> T:
        """As ``collect``, for what is this rank's alone."""
        ...

    def settle(self, work: Callable[[], object]) -> None:
        """Do the last thing of a call, which either all ranks do or none."""
        ...

    def border(self) -> None:
        """A chunk ends on all ranks."""
        ...

    def heads(self, query_heads: int, kv_heads: int) -> HeadShares:
        """Who holds which heads of a layer."""
        ...

    def to_heads(self, tensors: Attended, slices: TokenSlices, shares: HeadShares) -> Attended:
        """Queries, then keys and values: [B, heads, tokens run here, D] → [B, heads held here,
        tokens of the chunk, D]."""
        ...

    def to_tokens(self, o: torch.Tensor, slices: TokenSlices, shares: HeadShares) -> torch.Tensor:
        """The way back."""
        ...

    def to_whole(self, x: torch.Tensor, slices: TokenSlices) -> torch.Tensor:
        """[B, tokens run here, …] → [B, tokens of the chunk, …]."""
        ...

    def of_heads(self, per_head: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[query heads, …] → [query heads held here, …]."""
        ...

    def queries_of_keys(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, query heads held here, C, …] → all queries of the key/value heads held here."""
        ...

    def parts_of_queries(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, all queries of the key/value heads held here, C, …], a part of them on each rank that
        holds these heads → [ranks that hold them, B, query heads held here, C, …]."""
        ...

    def whole_queries(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, query heads held here, C, D] → of all heads."""
        ...

    def whole_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, n, key/value heads held here, D] → of all heads."""
        ...

    def of_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """The way back of :meth:`whole_keys`, for what the first rank has."""
        ...

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, with the same bits on each."""
        ...

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks."""
        ...

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their sums over ranks."""
        ...

    def whole_lists(self, lists: Lists, copies: int, *, per_head: bool, parted: bool) -> Lists:
        """Page lists [B, blocks, heads held here, budget] of layers and chunks, of all heads.

        Args:
            copies: ranks that hold the same heads.
            per_head: each head has a list of its own; else one list is that of all.
            parted: these ranks have a part of a list each, and not the same one.
        """
        ...

    def measure_with(self, stopwatch: Any) -> None:
        """From now on a stopwatch runs whenever ranks exchange tensors."""
        ...


@dataclass(frozen=True)
class AllHere:
    """One rank runs everything and holds the whole past."""

    rank: int = 0
    ranks: int = 1
    neighbours: int = 1

    def expect_device(self, device: torch.device) -> None:
        pass

    def close(self) -> None:
        pass

    def slices(self, begin: int, end: int) -> TokenSlices:
        return TokenSlices(begin, end, 1, 0)

    @contextmanager
    def call(self) -> Iterator[None]:
        yield

    def expect_same(self, texts: Callable[[], dict[str, str]]) -> None:
        texts()

    def collect(self, work: Callable[[], T]) -> list[T]:
        return [work()]

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def settle(self, work: Callable[[], object]) -> None:
        work()

    def border(self) -> None:
        pass

    def heads(self, query_heads: int, kv_heads: int) -> HeadShares:
        return HeadShares(query_heads, kv_heads, 1)

    def to_heads(self, tensors: Attended, slices: TokenSlices, shares: HeadShares) -> Attended:
        return tensors

    def to_tokens(self, o: torch.Tensor, slices: TokenSlices, shares: HeadShares) -> torch.Tensor:
        return o

    def to_whole(self, x: torch.Tensor, slices: TokenSlices) -> torch.Tensor:
        return x

    def of_heads(self, per_head: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return per_head

    def queries_of_keys(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return q

    def parts_of_queries(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return x[None]

    def whole_queries(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return q

    def whole_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return x

    def of_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        pass

    def whole_lists(self, lists: Lists, copies: int, *, per_head: bool, parted: bool) -> Lists:
        return lists

    def measure_with(self, stopwatch: Any) -> None:
        pass


@dataclass(frozen=True)
class HeadsOverRanks:
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
        return self.group.neighbours

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

    def whole_lists(self, lists: Lists, copies: int, *, per_head: bool, parted: bool) -> Lists:
        every = self.group.collect(lambda: lists)
        if not per_head:
            every = every[:copies]
        return [
            [
                None if of_ranks[0] is None else _whole(of_ranks, copies, parted=parted)
                for of_ranks in zip(*of_layer, strict=True)
            ]
            for of_layer in zip(*every, strict=True)
        ]

    def measure_with(self, stopwatch: Any) -> None:
        self.group.stopwatch = stopwatch


def _whole(of_ranks: Sequence[torch.Tensor], copies: int, *, parted: bool) -> torch.Tensor:
    """Lists of all heads, of which ``copies`` neighbours have the same ones or a part each."""
    groups = [of_ranks[first : first + copies] for first in range(0, len(of_ranks), copies)]
    if not parted:
        return torch.cat([group[0] for group in groups], dim=2)
    return torch.cat([joined(group) for group in groups], dim=2)
