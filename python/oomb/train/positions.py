"""Positions of a long text for a short one: what a model sees of distances grows, its work not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SkippedPositions:
    """Spreads documents over more positions than they have tokens.

    A document is cut at random places. Positions go up by one inside a piece and skip some between
    two, in all up to those of a document of ``span`` tokens:

        tokens      a b c d e f g h i
        positions   0 1 2 7 8 9 13 14 15         3 pieces, span 16

    Order and adjacency of the text stay; the distances that RoPE sees are those of a long text
    (PoSE, arXiv 2309.10400; LongRecipe, arXiv 2409.00509).

    Attributes:
        span: positions that a document is spread over; one that is longer keeps its own.
        pieces: of a document at most.
        seed: of borders and skips; they depend on it and on the document's place in the data.
    """

    span: int
    pieces: int
    seed: int

    def of(self, begin: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens] int64, ascending from 0.

        Args:
            begin: of the document, in the tokens of all data.
        """
        positions = np.arange(num_tokens)
        slack = self.span - num_tokens
        pieces = min(self.pieces, num_tokens)
        if slack <= 0 or pieces == 1:
            return torch.from_numpy(positions)
        random = np.random.default_rng([self.seed, begin])
        borders = 1 + random.permutation(num_tokens - 1)[: pieces - 1]
        skips = np.sort(random.integers(slack + 1, size=pieces - 1))
        for border, skipped in zip(np.sort(borders), np.diff(skips, prepend=0), strict=True):
            positions[border:] += skipped
        return torch.from_numpy(positions)
