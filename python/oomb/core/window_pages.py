"""How many pages a layer has, and how many of them have gradients at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oomb.core.layout import Chunks, GradientReach, seen_past


def existing_pages(chunks: Chunks, window: int, filled: int) -> npt.NDArray[np.bool_]:
    """Which pages of chunks [0, ``filled``) exist: those that a later chunk sees.

    Args:
        window: the widest of the layers that read them; 0: none.
    """
    if window == 0:
        return np.ones(chunks.first_page(filled), dtype=np.bool_)
    exist = np.zeros(chunks.first_page(filled), dtype=np.bool_)
    for chunk in range(filled):
        exist[slice(*chunks.pages_within(chunk, window))] = True
    return exist


def most_of_chunk(chunks: Chunks, window: int) -> int:
    """Pages of a whole chunk that exist."""
    behind = -(-(window - 1) // chunks.page_size)
    return min(chunks.most_pages, behind) if window else chunks.most_pages


def most_gradients(chunks: Chunks, window: int) -> int:
    """Pages with gradients at once in a layer with a window, at most: those that a chunk's first
    query sees, and as many of the chunk's own as exist."""
    return -(-(window - 1) // chunks.page_size) + 1 + most_of_chunk(chunks, window)


@dataclass(frozen=True)
class GradientPages:
    """Pages of one sequence with gradients in one layer, at most.

    Attributes:
        between: while other layers run.
        own: more while the layer itself does: a chunk's own, until they are read.
    """

    between: int
    own: int


def gradients_in_window(
    chunks: Chunks, window: int, reach: GradientReach, exist: npt.NDArray[np.bool_]
) -> GradientPages:
    """Of a layer with a sliding window: as far as it reaches back, not all that is to be swept.

    Their number stays the same however long the sequence is:

        sweep of chunk 3   [ 0      ][ 1      ][ 2    ▒▒]         ▒ pages with gradients
                       2   [ 0      ][ 1    ▒▒]
    """
    wanted = np.zeros_like(exist)
    for chunk in reach.swept[:-1]:
        wanted[slice(*chunks.pages(chunk))] = True
    wanted &= exist
    touched = np.zeros_like(exist)
    count = between = most_own = 0
    for chunk in reversed(reach.swept):
        reached = chunks.first_page(reach.first(chunk))
        for begin, last in seen_past(chunks, chunk, window):
            first = max(begin, reached)
            count += int((wanted[first:last] & ~touched[first:last]).sum())
            touched[first:last] |= wanted[first:last]
        own = touched[slice(*chunks.pages(chunk))]
        most_own = max(most_own, int(own.sum()))
        count -= int(own.sum())
        between = max(between, count)
        own[:] = False
    return GradientPages(between, most_own)
