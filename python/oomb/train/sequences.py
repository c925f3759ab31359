"""From documents to sequences: windows of one document, or several documents packed together."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oomb.train.positions import SkippedPositions
from oomb.train.rows import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

_SAMPLES, _SAMPLE = 256, 4096  # pieces, and their first tokens, that stand for all

Piece = tuple[int, int]  # first token and the one behind the last, of all tokens


class Tokens:
    """Tokens of all documents in a row, on disk; ``tokens[begin:end]`` reads some of them.

    Attributes:
        documents: (begin, end) of each document.
        counted: which tokens are predicted, [tokens] bool; None: all of them.
    """

    def __init__(self, dataset: Dataset) -> None:
        """``dataset``: as :func:`oomb.train.tokenise.tokenise` makes it."""
        import pyarrow.compute  # optional

        table = dataset.data.table
        lengths = pyarrow.compute.list_value_length(table.column("input_ids")).to_numpy()
        owners = table.column("document").to_numpy()
        self._rows = dataset.with_format("numpy", columns=["input_ids"])
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._begins = self._ends - lengths
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        begins = self._begins[firsts]
        ends = np.append(begins, len(self))[1:]
        self.documents: list[Piece] = list(zip(begins.tolist(), ends.tolist(), strict=True))
        self.counted = None
        if "counted" in table.column_names:
            self.counted = _all_marks(table.column("counted"), lengths)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, piece: slice) -> np.ndarray[Any, np.dtype[np.int64]]:
        begin, end = piece.start, piece.stop
        row = int(np.searchsorted(self._ends, begin, side="right"))
        parts = []
        while row < len(self._ends) and self._begins[row] < end:
            first = int(self._begins[row])
            parts.append(self._rows[row]["input_ids"][max(0, begin - first) : end - first])
            row += 1
        return np.concatenate(parts).astype(np.int64)

    def predicts(self, piece: Piece) -> bool:
        """Whether a token of a piece is predicted: its first one never is."""
        begin, end = piece
        if self.counted is None:
            return end - begin > 1
        return bool(self.counted[begin + 1 : end].any())


def _all_marks(column: Any, lengths: Any) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Marks of every token, where some row has any; a row without has them all set."""
    import pyarrow.compute  # optional

    if column.null_count == len(column):
        return None
    marks = np.ones(int(lengths.sum()), dtype=bool)
    given = np.repeat(column.is_valid().to_numpy(), lengths)
    marks[given] = pyarrow.compute.list_flatten(column).to_numpy()
    return marks


def _two_tokens(piece: Piece) -> bool:
    return piece[1] - piece[0] > 1


def windows(
    documents: Sequence[Piece], context: int, predicts: Callable[[Piece], bool] = _two_tokens
) -> list[list[Piece]]:
    """Each document in sequences of ``context`` tokens; its last is shorter.

    A piece that predicts nothing is dropped, such as a single token that is left of a document.
    """
    pieces = (
        (first, min(first + context, end))
        for begin, end in documents
        for first in range(begin, end, context)
    )
    return [[piece] for piece in pieces if predicts(piece)]


def packed(
    documents: Sequence[Piece], context: int, predicts: Callable[[Piece], bool] = _two_tokens
) -> list[list[Piece]]:
    """Documents in sequences of at most ``context`` tokens, longest first into the fullest fit.

    Only a document that is longer than ``context`` is cut.
    """
    pieces = [piece for [piece] in windows(documents, context, predicts)]
    pieces.sort(key=lambda piece: piece[0] - piece[1])  # stable: equal ones stay in order
    sequences: list[list[Piece]] = []
    rooms: list[int] = []  # distinct free sizes, ascending
    waiting: dict[int, list[int]] = {}  # sequences with that much room
    for piece in pieces:
        length = piece[1] - piece[0]
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            sequences.append([])
            number, room = len(sequences) - 1, context
        else:
            room = rooms[place]
            number = waiting[room].pop()
            if not waiting[room]:
                del waiting[room], rooms[place]
        sequences[number].append(piece)
        left = room - length
        if left > 1:
            if left not in waiting:
                bisect.insort(rooms, left)
            waiting.setdefault(left, []).append(number)
    return sequences


class SequenceDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences as a Trainer takes them.

    An item has ``input_ids``, ``labels`` and ``position_ids``, [tokens] int64. Positions restart at
    each document, which is how transformers and the engine tell documents apart. No targets are a
    document's first token and those that are not counted.

    Args:
        skipped: positions that skip some inside a document; then an item has ``document_ids`` too.
    """

    def __init__(
        self, tokens: Tokens, sequences: list[list[Piece]], skipped: SkippedPositions | None = None
    ) -> None:
        self.sequences = sequences
        self._tokens = tokens
        self._skipped = skipped

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pieces = self.sequences[index]
        ids = [torch.from_numpy(self._tokens[begin:end]) for begin, end in pieces]
        labels = torch.cat(ids)
        if self._tokens.counted is not None:
            marks = [self._tokens.counted[begin:end] for begin, end in pieces]
            labels[torch.from_numpy(~np.concatenate(marks))] = IGNORED
        labels[np.cumsum([0, *map(len, ids[:-1])])] = IGNORED
        item = {"input_ids": torch.cat(ids), "labels": labels}
        if self._skipped is None:
            return item | {"position_ids": torch.cat([torch.arange(len(part)) for part in ids])}
        positions = [self._skipped.of(begin, end - begin) for begin, end in pieces]
        numbers = [torch.full_like(part, number) for number, part in enumerate(ids)]
        return item | {"position_ids": torch.cat(positions), "document_ids": torch.cat(numbers)}

    def subset(self, indices: Sequence[int]) -> SequenceDataset:
        chosen = [self.sequences[index] for index in indices]
        return SequenceDataset(self._tokens, chosen, self._skipped)

    def spread(self, skipped: SkippedPositions) -> SequenceDataset:
        """The same sequences with positions that skip some."""
        return SequenceDataset(self._tokens, self.sequences, skipped)

    def identity(self) -> str:
        """Short text that another set of sequences does not share, from a sample of the tokens."""
        pieces = np.array([piece for sequence in self.sequences for piece in sequence])
        digest = hashlib.sha256(pieces.tobytes())
        if self._skipped is not None:
            digest.update(repr(self._skipped).encode())
        for begin, end in pieces[:: -(-len(pieces) // _SAMPLES)].tolist():
            behind = min(end, begin + _SAMPLE)
            digest.update(self._tokens[begin:behind].tobytes())
            if self._tokens.counted is not None:
                digest.update(self._tokens.counted[begin:behind].tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return sum(end - begin for pieces in self.sequences for begin, end in pieces)

    @property
    def num_targets(self) -> int | None:
        """Tokens that are predicted; None: all but each document's first."""
        counted = self._tokens.counted
        if counted is None:
            return None
        return sum(int(counted[b + 1 : e].sum()) for pieces in self.sequences for b, e in pieces)

    @property
    def longest_document(self) -> int:
        """Positions needed: tokens of the longest piece of a document, or their span."""
        longest = max(end - begin for pieces in self.sequences for begin, end in pieces)
        return longest if self._skipped is None else max(longest, self._skipped.span)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(sum(end - begin for begin, end in pieces) for pieces in self.sequences)


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Items as one batch [sequences, tokens]; padding is a document of its own, not counted."""
    longest = max(len(item["input_ids"]) for item in items)

    def column(name: str, padding: torch.Tensor) -> torch.Tensor:
        rows = [torch.cat((item[name], padding[: longest - len(item[name])])) for item in items]
        return torch.stack(rows)

    nothing = torch.zeros(longest, dtype=torch.int64)
    batch = {
        "input_ids": column("input_ids", nothing),
        "labels": column("labels", torch.full_like(nothing, IGNORED)),
        "position_ids": column("position_ids", torch.arange(longest)),
    }
    if "document_ids" in items[0]:
        batch["document_ids"] = column("document_ids", torch.full_like(nothing, -1))
    return batch
