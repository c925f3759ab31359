"""How the tokens of a chunk are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class TokenSlices:
    """Contiguous slices of the tokens [begin, end) of a chunk, one a rank; sizes differ by one.

    chunk        | 0 1 2 3 4 5 6 7 8 9 |      3 ranks: 3, 3 and 4 tokens
    rank         | 0     | 1     | 2        |
    """

    begin: int
    end: int
    ranks: int
    rank: int

    @property
    def sizes(self) -> list[int]:
        """Tokens of each rank."""
        bounds = [self._bound(rank) for rank in range(self.ranks + 1)]
        return [last - first for first, last in pairwise(bounds)]

    @property
    def own(self) -> tuple[int, int]:
        """First token of this rank and last + 1; nothing where the chunk is too short."""
        return self._bound(self.rank), self._bound(self.rank + 1)

    @property
    def run(self) -> tuple[int, int]:
        """What this rank runs: its own tokens, or one that counts nowhere where it has none.

        Models cannot run nothing, and every rank has to take part in every exchange.
        """
        first, last = self.own
        return (first, last) if last > first else (self.begin, self.begin + 1)

    def _bound(self, rank: int) -> int:
        return self.begin + (self.end - self.begin) * rank // self.ranks
