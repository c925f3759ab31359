"""How far gradient reaches back in one call: which chunks have gradient pages, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomb.config import BackwardRule, TruncatedChunks


@dataclass(frozen=True)
class GradientReach:
    """Which chunks have gradient pages, and since when.

    Their number is largest when the last chunk is swept. With a ``window``, a chunk's pages are
    asked for when the first chunk that reaches it is swept:

        window 2     sweep of chunk 4    gradient pages of   2 3
                                    3                      1 2 3     until its own are read
                                    2                    0 1 2

    Attributes:
        swept: chunks that receive gradient, ascending.
        window: chunks that gradient reaches back; None: all.
    """

    swept: Sequence[int]
    window: int | None

    @staticmethod
    def of(rule: BackwardRule, swept: Sequence[int]) -> GradientReach:
        """``swept`` is kept as it is: a range of a long text's chunks takes no memory."""
        return GradientReach(swept, rule.window if isinstance(rule, TruncatedChunks) else None)

    @property
    def at_start(self) -> Sequence[int]:
        """Chunks that have gradient pages from the start of the sweep."""
        earlier = self.swept[:-1]
        return earlier if self.window is None else earlier[max(0, len(earlier) - self.window) :]

    def added(self, chunk: int) -> int | None:
        """The chunk that ``chunk`` is the first to reach, beside those of :attr:`at_start`."""
        if not self.window or chunk == self.swept[-1] or chunk < self.window:
            return None
        return chunk - self.window

    def first(self, chunk: int) -> int:
        """The first chunk that the gradient of ``chunk`` reaches."""
        return 0 if self.window is None else max(0, chunk - self.window)

    def at_once(self, num_layers: int, *, shared: bool = False) -> int:
        """Chunks with gradient pages, in every layer, at most.

        A layer's own are read after it has added to its past, as the diagram shows. Other layers
        have given back the keys and values of that chunk by then; a single layer has not, nor have
        layers whose keys and values others read (``shared``), which are the first to add.
        """
        number, earlier = len(self.at_start), len(self.swept[:-1])
        one_more = self.window and (num_layers == 1 or shared)
        return min(number + 1, earlier) if one_more else number
