"""Attention over a past that ranks divide: partial outputs, and the whole ones that they make.

Ranks that share a key/value head hold some of its pages each, and its queries are divided among
them as among copies. Around the kernels queries of all are on each, and outputs go back:

              rank 0                             rank 1
    before    queries a, b                       queries c, d
    kernels   a b c d over pages of rank 0       a b c d over pages of rank 1
    after     a, b: both parts merged            c, d: both parts merged
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oomb.parallel.heads import HeadShares
from oomb.parallel.in_order import added_in_order
from oomb.parallel.placement import Placement

Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Backward = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
]


class WholeAttention:
    """A rank has the whole past of its queries' heads."""

    @contextmanager
    def forward(self, q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> Iterator[Forward]:
        """Around the kernels of a forward, which compute ``o`` and ``lse`` of ``q``.

        Yields:
            The queries that kernels take, and where they leave o and the log-sum-exp of these.
        """
        yield q, o, lse

    @contextmanager
    def backward(
        self,
        q: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        dq: torch.Tensor,
    ) -> Iterator[Backward]:
        """Around the kernels of a backward, which compute ``dq``.

        Yields:
            All of these, as kernels take them.
        """
        yield q, o, lse, d_o, d_lse, dq


@dataclass(frozen=True)
class PartialAttention(WholeAttention):
    """Ranks that share a key/value head have a part of its past each.

    Args:
        shares: who has which queries.
    """

    placement: Placement
    shares: HeadShares

    @contextmanager
    def forward(self, q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> Iterator[Forward]:
        every = self._gathered(q)
        part, part_lse = torch.empty_like(every), lse.new_empty(every.shape[:3])
        yield every, part, part_lse
        whole, whole_lse = merged(self._returned(part), self._returned(part_lse))
        o.copy_(whole)
        lse.copy_(whole_lse)

    @contextmanager
    def backward(
        self,
        q: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        dq: torch.Tensor,
    ) -> Iterator[Backward]:
        # Of o and d_lse kernels need delta alone, the sum of o * d_o less d_lse: it travels in
        # their place, and kernels that are given o = 0 and d_lse = -delta find it again.
        minus_delta = -(o.to(lse.dtype) * d_o).sum(-1)
        if d_lse is not None:
            minus_delta += d_lse
        every, every_d = self._gathered(torch.cat([q, d_o])).chunk(2)
        every_lse, every_minus_delta = self._gathered(torch.cat([lse, minus_delta])).chunk(2)
        zeros, part = torch.zeros_like(every), torch.empty_like(every)
        yield every, zeros, every_lse, every_d, every_minus_delta, part
        dq.copy_(added_in_order(self._returned(part)))

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return self.placement.queries_of_keys(x, self.shares)

    def _returned(self, x: torch.Tensor) -> torch.Tensor:
        return self.placement.parts_of_queries(x, self.shares)


WHOLE = WholeAttention()


def merged(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from that over parts of them, added in the order of parts.

    o = sum of o_i · e^(lse_i - lse) with lse = log sum e^lse_i; a row that sees nothing in any part
    has o = 0 and lse = -inf.

    Args:
        o: of each part, [parts, ..., D].
        lse: natural log-sum-exp of each part's scores, [parts, ...]; -inf: a row sees nothing of
            it.

    Returns:
        o and lse in the dtype of ``lse``.
    """
    peak = lse.amax(dim=0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    shares = (lse - peak).exp()
    total = added_in_order(shares)
    shares /= total.masked_fill(total == 0, 1.0)
    whole = o[0] * shares[0][..., None]
    for part, share in zip(o[1:], shares[1:], strict=True):
        whole += part * share[..., None]
    return whole, peak + total.log()
