"""Which rows of a batch begin alike: a tree of stretches that rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oomb.core.inputs import IGNORED

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Tokens [begin, end) that each of ``rows`` has, behind those of its parent.

    Attributes:
        parent: number of the stretch before it; -1: it is a row's first.
        targets: [end - begin] of all its rows together, IGNORED where none has one.
    """

    parent: int
    rows: tuple[int, ...]
    begin: int
    end: int
    targets: Tokens


def shared_stretches(
    tokens: Tokens, positions: Tokens, targets: Tokens, lengths: Sequence[int], unit: int
) -> list[Stretch]:
    """Stretches of rows, each once however many rows have it; a row's follow one another.

    Rows share a stretch as long as tokens and positions are equal, and no place predicts different
    targets. Where they part, a stretch that several share ends at a multiple of ``unit``, and each
    row begins there anew with the rest. So the last shared token, which predicts another token in
    each row, is never in the shared part.

    Parents come before their children, and rows in order: depth first.

    Args:
        tokens, positions, targets: [rows, tokens].
        lengths: tokens of each row.
    """
    found: list[Stretch] = []

    def agree(row: int, other: int, merged: Tokens, begin: int, end: int) -> int:
        """Where the stretch ends in which a row agrees with another one and its targets."""
        span, own = slice(begin, end), targets[row, begin:end]
        differ = (tokens[row, span] != tokens[other, span]) | (
            positions[row, span] != positions[other, span]
        )
        differ |= (own != merged) & (own != IGNORED) & (merged != IGNORED)
        return begin + (int(differ.argmax()) if differ.any() else end - begin)

    def group(rows: list[int], begin: int) -> list[list[int]]:
        """Rows whose next ``unit`` tokens are alike."""
        end, groups, merged = begin + unit, list[list[int]](), list[Tokens]()
        for row in rows:
            whole = lengths[row] >= end
            for members, known in zip(groups, merged, strict=True):
                alike = whole and lengths[members[0]] >= end
                if alike and agree(row, members[0], known, begin, end) == end:
                    members.append(row)
                    _merge(known, targets[row, begin:end])
                    break
            else:
                groups.append([row])
                merged.append(targets[row, begin:end].copy())
        return groups

    def grow(parent: int, rows: list[int], begin: int) -> None:
        for members in group([row for row in rows if lengths[row] > begin], begin):
            end = min(lengths[row] for row in members)
            merged = targets[members[0], begin:end].copy()
            for row in members[1:]:
                end = agree(row, members[0], merged[: end - begin], begin, end)
                merged = merged[: end - begin]
                _merge(merged, targets[row, begin:end])
            if len(members) > 1:
                end = begin + (end - begin) // unit * unit
            found.append(Stretch(parent, tuple(members), begin, end, merged[: end - begin]))
            if len(members) > 1:
                grow(len(found) - 1, members, end)

    grow(-1, list(range(len(lengths))), 0)
    return found


def _merge(known: Tokens, others: Tokens) -> None:
    known[:] = np.where(known == IGNORED, others, known)
