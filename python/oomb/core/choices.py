"""A guess of the pages that page-sparse attention will choose, before there is a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oomb.config import PageRule, TopKPages


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a block of queries chooses among the past's pages.

    Attributes:
        carried: share of its pages that a block takes over from the block before.
        first, latest: pages at the text's begin and before the chunk that every block chooses.
    """

    carried: float = 0.5
    first: int = 4
    latest: int = 8

    def share(self, rule: PageRule, past: int, blocks: int, heads: int) -> float:
        """Part of ``past`` pages, more than the budget, that one layer of a chunk chooses.

        Args:
            blocks: of queries in the chunk.
            heads: that choose for themselves.
        """
        expected = rule.expected_share(past, blocks)
        if expected is not None:
            return expected
        first, latest = self._forced(rule)
        free, others = rule.max_pages - first - latest, past - first - latest
        kept = self.carried * free
        # A page that is none of a block's is one of the next block's with this probability.
        fresh = (free - kept) / max(1.0, others - kept)
        left_out = ((1 - free / others) * (1 - fresh) ** (blocks - 1)) ** heads
        share = 1 - left_out * others / past
        bound = rule.chunk_budget if isinstance(rule, TopKPages) else None
        return share if bound is None else min(share, bound / past)

    def draw(
        self, random: np.random.Generator, rule: PageRule, past: int, share: float, together: int
    ) -> npt.NDArray[np.int64]:
        """``share`` of the past, in groups of ``together`` pages: ascending numbers of groups."""
        first, latest = (-(-number // together) for number in self._forced(rule))
        groups = past // together
        others = max(1, groups - first - latest)
        chosen = random.random(groups) < (share * groups - first - latest) / others
        chosen[:first] = chosen[groups - latest :] = True
        return np.flatnonzero(chosen)

    def _forced(self, rule: PageRule) -> tuple[int, int]:
        sinks, recent = 0, 0
        if isinstance(rule, TopKPages):
            sinks, recent = rule.sink_pages, rule.recent_pages
        first, latest = max(self.first, sinks), max(self.latest, recent)
        return (first, latest) if first + latest <= rule.max_pages else (sinks, recent)


UNIFORM = Choices(carried=0.0, first=0, latest=0)  # every page equally likely, block by block
