"""Which rank holds which part of a layer's past, and runs which tokens of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from oomb.parallel.heads import HeadShares
from oomb.parallel.slices import TokenSlices

T = TypeVar("T")
Attended = tuple[torch.Tensor, ...]
Lists = list[list[torch.Tensor | None]]


class Placement:
    """How a call is spread over ranks. Here one rank runs everything and holds the whole past.

    Attributes:
        rank: of this process among those of the sequence.
        ranks: their number.
    """

    __slots__ = ()  # a constant: nobody assigns to it

    rank: int = 0
    ranks: int = 1

    @property
    def neighbours(self) -> int:
        """Processes that share this host's memory."""
        return 1

    def slices(self, begin: int, end: int) -> TokenSlices:
        """Who runs which of the tokens [begin, end) of a chunk."""
        return TokenSlices(begin, end, 1, 0)

    def expect_device(self, device: torch.device) -> None:
        """Raise unless a model's device is one that ranks can be on."""

    def close(self) -> None:
        """No call will come."""

    def call(self) -> AbstractContextManager[None]:
        """Around a call: an error of one rank inside is raised by all."""
        return nullcontext()

    def expect_same(self, texts: Callable[[], dict[str, str]]) -> None:
        """Raise a ValueError unless all ranks say the same of each argument.

        Args:
            texts: what this rank says; its own error is raised by all.
        """
        texts()

    def collect(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returned on each rank; an error of one is raised by all."""
        return [work()]

    def together(self, work: Callable[[], T]) -> T:
        """As ``collect``, for what is this rank's alone."""
        return work()

    def settle(self, work: Callable[[], object]) -> None:
        """Do the last thing of a call, which either all ranks do or none."""
        work()

    def border(self) -> None:
        """A chunk ends on all ranks."""

    def heads(self, query_heads: int, kv_heads: int) -> HeadShares:
        """Who holds which heads of a layer."""
        return HeadShares(query_heads, kv_heads, 1)

    def to_heads(self, tensors: Attended, slices: TokenSlices, shares: HeadShares) -> Attended:
        """Queries, then keys and values: [B, heads, tokens run here, D] → [B, heads held here,
        tokens of the chunk, D]."""
        return tensors

    def to_tokens(self, o: torch.Tensor, slices: TokenSlices, shares: HeadShares) -> torch.Tensor:
        """The way back."""
        return o

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
        raise AssertionError("one rank sends nothing")

    def to_whole(self, x: torch.Tensor, slices: TokenSlices) -> torch.Tensor:
        """[B, tokens run here, …] → [B, tokens of the chunk, …]."""
        return x

    def of_heads(self, per_head: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[query heads, …] → [query heads held here, …]."""
        return per_head

    def queries_of_keys(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, query heads held here, C, …] → all queries of the key/value heads held here."""
        return q

    def parts_of_queries(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, all queries of the key/value heads held here, C, …], a part of them on each rank that
        holds these heads → [ranks that hold them, B, query heads held here, C, …]."""
        return x[None]

    def whole_queries(self, q: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, query heads held here, C, D] → of all heads."""
        return q

    def whole_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """[B, n, key/value heads held here, D] → of all heads."""
        return x

    def of_keys(self, x: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """The way back of :meth:`whole_keys`, for what the first rank has."""
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, with the same bits on each."""
        return x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks."""
        return x

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their sums over ranks."""

    def sum_beside(self, tensors: list[torch.Tensor]) -> None:
        """Begin :meth:`sum_`. Nobody touches them before :meth:`finish_sums`."""

    def finish_sums(self) -> None:
        """They are there."""

    def whole_lists(self, lists: Lists, copies: int, *, per_head: bool, parted: bool) -> Lists:
        """Page lists [B, blocks, heads held here, budget] of layers and chunks, of all heads.

        Args:
            copies: ranks that hold the same heads.
            per_head: each head has a list of its own; else one list is that of all.
            parted: these ranks have a part of a list each, and not the same one.
        """
        return lists

    def measure_with(self, stopwatch: Any) -> None:
        """From now on a stopwatch runs whenever ranks exchange tensors."""

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        """From now on work is done while gradients of heads travel; None: none."""
