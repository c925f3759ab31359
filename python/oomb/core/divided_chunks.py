"""Pages of a sequence divided among the ranks that share a key/value head, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from oomb.core.layout import Chunks, PagedLayers
from oomb.core.tree import TreeChunks


@dataclass(frozen=True)
class Division:
    """Ranks take chunks in turn. Each numbers its own pages alone, in the order of the sequence.

        chunk              0     1     2     3     4
        pages of rank 0    0-3         4-7         8-11     past of chunk 3: 0-7
        pages of rank 1          0-3         4-7            past of chunk 3: 0-3

    So the pages of a past lie one behind the other, and its keys have other numbers than in the
    sequence. The keys of a chunk itself are seen by its rank alone.

    Attributes:
        ranks: that share a key/value head; 1: nothing is divided.
        rank: this one among them.
    """

    ranks: int = 1
    rank: int = 0

    def owns(self, chunk: int) -> bool:
        """Whether this rank has the pages of a chunk."""
        return chunk % self.ranks == self.rank

    def chunks(self, whole: Chunks) -> Chunks:
        """Chunks of a sequence with the pages that this rank has of them."""
        if self.ranks == 1:
            return whole
        if isinstance(whole, TreeChunks):
            return self._of_tree(whole)
        return DividedChunks(whole.tokens, whole.chunk_size, whole.page_size, self)

    def _of_tree(self, whole: TreeChunks) -> TreeChunks:
        pages = [last - first for first, last in pairwise(whole.first_pages)]
        own = [number * self.owns(chunk) for chunk, number in enumerate(pages)]
        firsts = tuple(accumulate(own, initial=0))
        place = dict(zip(whole.first_pages, firsts, strict=True))  # of a border between pages
        pasts = tuple(
            tuple((place[first], place[last]) for first, last in past) for past in whole.pasts
        )
        return replace(whole, first_pages=firsts, pasts=pasts)

    def numbers(self, whole: Chunks, past: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
        """Of each page of a past its number in the past of this rank; -1: another's.

        Args:
            whole: chunks of the sequence with all of their pages.
            past: pages [first, last), as of :meth:`Chunks.past`.
        """
        pages = np.concatenate([np.arange(first, last) for first, last in past])
        firsts = [whole.first_page(chunk) for chunk in range(whole.number + 1)]
        own = (np.searchsorted(firsts, pages, side="right") - 1) % self.ranks == self.rank
        return np.where(own, np.cumsum(own) - 1, -1).astype(np.int32)

    def most_of(self, chunks: Sequence[int]) -> int:
        """Of some chunks the most that one rank has."""
        if self.ranks == 1 or not chunks:
            return len(chunks)
        return int(np.bincount(np.asarray(chunks) % self.ranks).max())


@dataclass(frozen=True)
class KeyNumbers:
    """How a rank numbers the keys of a sequence, of which it has those of its chunks.

    Attributes:
        begins: int32 [chunks]: first key of each chunk, as the sequence numbers it.
        before: int32 [chunks + 1]: keys that the rank has before each of them, and of all.
    """

    begins: torch.Tensor
    before: torch.Tensor

    @staticmethod
    def of(division: Division, whole: Chunks, device: torch.device) -> KeyNumbers:
        own = [division.owns(c) * (end - begin) for c, (begin, end) in enumerate(whole.spans)]
        return KeyNumbers(
            torch.tensor([begin for begin, _ in whole.spans], dtype=torch.int32, device=device),
            torch.tensor([0, *accumulate(own)], dtype=torch.int32, device=device),
        )

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Of each key of the sequence, how many of the rank's come before it; all int32."""
        chunk = torch.searchsorted(self.begins, keys.contiguous(), right=True) - 1
        inside, before = keys - self.begins[chunk], self.before[chunk]
        return before + inside.minimum(self.before[chunk + 1] - before)


@dataclass(frozen=True)
class DividedChunks(Chunks):
    """Chunks of a plain sequence, with the pages of one rank."""

    division: Division

    def first_page(self, chunk: int) -> int:
        ranks, rank = self.division.ranks, self.division.rank
        return (chunk + ranks - 1 - rank) // ranks * self.most_pages

    def pages_of(self, tokens: int) -> int:
        whole = tokens // self.chunk_size
        rest = -(-(tokens % self.chunk_size) // self.page_size)
        return self.first_page(whole) + rest * self.division.owns(whole)


def divided(layers: PagedLayers, divisions: Sequence[Division]) -> PagedLayers:
    """Layers whose pages ranks divide, each as its own division says."""
    cut = zip(layers.chunks, divisions, strict=True)
    return replace(layers, chunks=tuple(division.chunks(chunks) for chunks, division in cut))
