"""Rows of a batch that begin alike: a tree of stretches, and the one sequence that it is run as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from oomb.config import AllChunks, Config, PageRule
from oomb.core.inputs import IGNORED, CallInputs, expect
from oomb.core.layout import Chunks
from oomb.core.tiers import wave_pages
from oomb.model.mixers import Mixer

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


# A chunk of fewer tokens takes no less time: a GPU reads the model's weights meanwhile.
_LEAST = {"cpu": 1, "cuda": 512}


@dataclass(frozen=True)
class TreeChunks(Chunks):
    """Chunks of stretches that lie one behind the other, depth first.

    A chunk lies in one stretch. Its past is that of its own row alone: pages of the stretches that
    lead to its own, and of its own. What no later chunk reads has no pages.

        stretch         prompt      first row   second row
        chunks          0   1   2   3   4       5   6
        pages           0-3 4-7 8-9 10-13       14-17
        past of 6       ┕━━━━━━━━━┙             ┕━━━┙        10 … 13 are another row's

    Attributes:
        ends: last token + 1 of each chunk.
        pasts: pages [first, last) of each chunk's past, in ranges.
        first_pages: of each chunk, and the number of all.
    """

    ends: tuple[int, ...]
    pasts: tuple[tuple[tuple[int, int], ...], ...]
    first_pages: tuple[int, ...]

    @staticmethod
    def of_stretches(
        stretches: Sequence[tuple[int, int]], chunk_size: int, page_size: int, unit: int
    ) -> TreeChunks:
        """
        Args:
            stretches: (parent or -1, tokens) of each, depth first; where others follow one, its
                tokens are a multiple of ``unit``.
            unit: tokens; chunks begin at multiples of it within their stretch. It divides
                ``chunk_size``, or is less than half of it.
        """
        limit = chunk_size // unit * unit
        ends: list[int] = []
        befores: list[tuple[int, ...]] = []  # chunks of the past
        leading: list[tuple[int, ...]] = []  # of each stretch: chunks up to its end
        begin = 0
        for parent, tokens in stretches:
            past = leading[parent] if parent >= 0 else ()
            for end in _cuts(tokens, limit, unit):
                ends.append(begin + end)
                befores.append(past)
                past = (*past, len(ends) - 1)
            begin += tokens
            leading.append(past)
        read = {chunk for before in befores for chunk in before}
        pages = [0]
        for chunk, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            pages.append(pages[-1] + (-(-(last - first) // page_size) if chunk in read else 0))
        pasts = tuple(_joined((pages[c], pages[c + 1]) for c in before) for before in befores)
        return TreeChunks(begin, chunk_size, page_size, tuple(ends), pasts, tuple(pages))

    @property
    def number(self) -> int:
        return len(self.ends)

    def span(self, chunk: int) -> tuple[int, int]:
        return self.ends[chunk - 1] if chunk else 0, self.ends[chunk]

    def first_page(self, chunk: int) -> int:
        return self.first_pages[chunk]

    def past(self, chunk: int) -> tuple[tuple[int, int], ...]:
        return self.pasts[chunk]


def _cuts(tokens: int, limit: int, unit: int) -> list[int]:
    """Ends of a stretch's chunks: whole ones, but for the last two, which are equally long."""
    whole = max(0, -(-tokens // limit) - 2)
    rest = tokens - whole * limit
    half = rest if rest <= limit else -(-rest // (2 * unit)) * unit
    ends = [limit * number for number in range(1, whole + 1)]
    ends += [whole * limit + end for end in (half, rest) if end]
    return list(dict.fromkeys(ends))


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours as one; none at all as an empty one."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined) or ((0, 0),)


@dataclass(frozen=True)
class Tree:
    """The rows of a call, and the one sequence that stands for them.

    Attributes:
        rows: the call's inputs as they were given, [B, T].
        inputs: of the sequence, [1, N]; each stretch of tokens once.
        chunks: of the sequence.
        places: [B, tokens given] int64: where a row's token stands in the sequence; -1: nowhere.
    """

    rows: CallInputs
    inputs: CallInputs
    chunks: TreeChunks
    places: torch.Tensor

    @staticmethod
    def of(config: Config, rows: CallInputs, every_token: bool) -> Tree:
        """Arguments as of :func:`tree_of`."""
        device = rows.input_ids.device
        tokens, positions, targets = (
            x.cpu().numpy().astype(np.int64)
            for x in (rows.input_ids, rows.position_ids, rows.targets)
        )
        lengths = _needed(rows, every_token)
        # Page rules choose by chunk; so branches begin where a row of its own has a border, too.
        least = config.page_size * wave_pages(device, config.page_size)
        sparse = isinstance(config.attention, PageRule) or 2 * least > config.chunk_size
        unit = config.chunk_size if sparse else least
        stretches = shared_stretches(tokens, positions, targets, lengths, unit)
        chunks = TreeChunks.of_stretches(
            [(one.parent, one.end - one.begin) for one in stretches],
            config.chunk_size,
            config.page_size,
            unit,
        )
        places = np.full((rows.batch, rows.num_given), -1)
        begin = 0
        for one in stretches:
            length = one.end - one.begin
            places[list(one.rows), one.begin : one.end] = begin + np.arange(length)
            begin += length

        def line(of_rows: Tokens, dtype: torch.dtype) -> torch.Tensor:
            parts = [of_rows[one.rows[0], one.begin : one.end] for one in stretches]
            return torch.from_numpy(np.concatenate(parts)[None]).to(device, dtype)

        wanted = np.concatenate([one.targets for one in stretches])[None]
        inputs = replace(
            rows,
            input_ids=line(tokens, torch.int64),
            position_ids=line(positions, torch.int32),
            targets=torch.from_numpy(wanted).to(device, torch.int32),
            num_keys=None,
            num_given=begin + 1,  # a value stands at the token that is predicted
            own_chunks=chunks,
        )
        return Tree(rows, inputs, chunks, torch.from_numpy(places).to(device))

    @property
    def is_less_work(self) -> bool:
        """Than all rows together, padded to the longest."""
        least = _LEAST[self.places.device.type]
        here = sum(max(end - begin, least) for begin, end in self.chunks.spans)
        return here < self.rows.batch * self.rows.tokens

    def to_rows(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Values [1, N + 1, …] of the sequence as the rows have them, [B, tokens given, …]."""
        places, there = self._places_of(name)
        found = values[0][places.to(values.device).clamp(min=0)]
        found[~there.to(values.device)] = 0
        return found

    def from_rows(self, name: str, gradients: torch.Tensor) -> torch.Tensor:
        """Sums over rows, in their order, of what belongs to one place of the sequence."""
        places, there = (x.to(gradients.device) for x in self._places_of(name))
        size = self.inputs.num_given, *gradients.shape[2:]
        total = gradients.new_zeros(size)
        for row, place, ok in zip(gradients, places, there, strict=True):
            total[place[ok]] += row[ok]  # of a row, no place stands twice
        return total[None]

    def _places_of(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a value of each token stands, and whether it does."""
        return self._of_tokens if name == "hidden" else self._of_targets

    @cached_property
    def _of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.places, self.places >= 0

    @cached_property
    def _of_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Behind the token that predicts, if the row itself has a target there."""
        rows, places = self.rows, torch.full_like(self.places, -1)
        places[:, 1:] = self.places[:, :-1] + 1
        there = torch.zeros_like(places, dtype=torch.bool)
        counted = (rows.targets != IGNORED)[:, : rows.num_given - 1]
        there[:, 1 : 1 + counted.shape[1]] = counted
        return places, there


def tree_of(
    share: bool | str,
    rows: CallInputs,
    config: Config,
    mixers: Sequence[Mixer],
    every_token: bool,
) -> Tree | None:
    """The tree of a call's rows; None: they are run as they are.

    Args:
        share: ``"auto"``: if the tree can be had and is less work.
        mixers: of the model.
        every_token: of a row are wanted; else those up to its last target.

    Raises:
        ValueError: rows, settings or model whose chunks cannot branch.
    """
    known = isinstance(share, bool) or share == "auto"
    expect(known, "share_prefixes", "True, False or 'auto'", repr(share))
    if share is False:
        return None
    if share == "auto":
        if not _can_branch(rows, config, mixers):
            return None
        tree = Tree.of(config, rows, every_token)
        return tree if tree.is_less_work else None
    rule = config.backward
    expect(
        isinstance(rule, AllChunks),
        "share_prefixes",
        "backward=oomb.AllChunks() beside it",
        repr(rule),
    )
    expect(rows.images is None, "share_prefixes", "rows of text alone", "images among them")
    plain = rows.first_key is None
    expect(plain, "share_prefixes", "rows of one document each", "packed documents")
    what = f"{mixers[0].name}, which hands a state from token to token" if mixers else ""
    expect(not mixers, "share_prefixes", "a model whose tokens meet in attention alone", what)
    return Tree.of(config, rows, every_token)


def _can_branch(rows: CallInputs, config: Config, mixers: Sequence[Mixer]) -> bool:
    plain = rows.first_key is None and rows.images is None
    return isinstance(config.backward, AllChunks) and plain and not mixers


def _needed(rows: CallInputs, every_token: bool) -> list[int]:
    """Tokens of each row up to its last target, or up to its padding."""
    if every_token:
        if rows.num_keys is None:
            return [rows.tokens] * rows.batch
        return [int(x) for x in rows.num_keys.tolist()]
    counted = rows.targets != IGNORED
    ends = torch.arange(1, rows.tokens + 1, device=counted.device)
    return [int(x) for x in (counted * ends).amax(dim=1).tolist()]
