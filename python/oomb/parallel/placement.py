"""Which rank holds which part of a layer's past, and runs which tokens of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from oomb.parallel.heads import HeadShares
from oomb.parallel.slices import TokenSlices

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

    def known_output(
        self,
        tensors: Attended,
        backward: Callable[..., Attended],
        slices: TokenSlices,
        shares: HeadShares,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o of the tokens run here and the log-sum-exp of the heads held here, as autograd sees
        them where they are known.

        Args:
            tensors: q, k, v and o of these tokens, and that log-sum-exp.
            backward: of attention: gives gradients of q, k and v, is given these, o, the
                log-sum-exp and the gradient of o; of the heads held here, of all tokens.
        """
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

    def sum_beside(self, tensors: list[torch.Tensor]) -> None:
        """Begin :meth:`sum_`. Nobody touches them before :meth:`finish_sums`."""
        ...

    def finish_sums(self) -> None:
        """They are there."""
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

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        """From now on work is done while gradients of heads travel; None: none."""
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

    def known_output(
        self,
        tensors: Attended,
        backward: Callable[..., Attended],
        slices: TokenSlices,
        shares: HeadShares,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("one rank sends nothing")

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

    def sum_beside(self, tensors: list[torch.Tensor]) -> None:
        pass

    def finish_sums(self) -> None:
        pass

    def whole_lists(self, lists: Lists, copies: int, *, per_head: bool, parted: bool) -> Lists:
        return lists

    def measure_with(self, stopwatch: Any) -> None:
        pass

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        pass
