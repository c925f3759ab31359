"""From documents to sequences: windows of one document, or several documents packed together."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100
_SAMPLES, _SAMPLE = 256, 4096  # pieces, and their first tokens, that stand for all

Piece = tuple[int, int]  # first token and the one behind the last, of all tokens


class Tokens:
    """Tokens of all documents in a row, on disk; ``tokens[begin:end]`` reads some of them.

    Attributes:
        documents: (begin, end) of each document.
    """

    def __init__(self, dataset: Dataset) -> None:
        """``dataset``: ``document`` and ``input_ids``, as :func:`oomb.train.tokenise.tokenise`."""
        import pyarrow.compute  # optional

        table = dataset.data.select(["document", "input_ids"])
        lengths = pyarrow.compute.list_value_length(table.column("input_ids")).to_numpy()
        owners = table.column("document").to_numpy()
        self._rows = dataset.with_format("numpy", columns=["input_ids"])
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._begins = self._ends - lengths
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        begins = self._begins[firsts]
        ends = np.append(begins[1:], len(self))
        self.documents: list[Piece] = list(zip(begins.tolist(), ends.tolist(), strict=True))

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


def windows(documents: Sequence[Piece], context: int) -> list[list[Piece]]:
    """Each document in sequences of ``context`` tokens; its last is shorter.

    What is left of a document is dropped where it is a single token, which predicts nothing.
    """
    return [
        [(first, min(first + context, end))]
        for begin, end in documents
        for first in range(begin, end, context)
        if end - first > 1
    ]


def packed(documents: Sequence[Piece], context: int) -> list[list[Piece]]:
    """Documents in sequences of at most ``context`` tokens, longest first into the fullest fit.

    Only a document that is longer than ``context`` is cut.
    """
    pieces = [piece for [piece] in windows(documents, context)]
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
    each document, which is how transformers and the engine tell documents apart; a document's first
    token is no target.
    """

    def __init__(self, tokens: Tokens, sequences: list[list[Piece]]) -> None:
        self.sequences = sequences
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pieces = self.sequences[index]
        ids = [torch.from_numpy(self._tokens[begin:end]) for begin, end in pieces]
        labels = torch.cat(ids)
        labels[np.cumsum([0, *map(len, ids[:-1])])] = IGNORED
        return {
            "input_ids": torch.cat(ids),
            "labels": labels,
            "position_ids": torch.cat([torch.arange(len(part)) for part in ids]),
        }

    def subset(self, indices: Sequence[int]) -> SequenceDataset:
        return SequenceDataset(self._tokens, [self.sequences[index] for index in indices])

    def identity(self) -> str:
        """Short text that another set of sequences does not share, from a sample of the tokens."""
        pieces = np.array([piece for sequence in self.sequences for piece in sequence])
        digest = hashlib.sha256(pieces.tobytes())
        for begin, end in pieces[:: -(-len(pieces) // _SAMPLES)].tolist():
            digest.update(self._tokens[begin : min(end, begin + _SAMPLE)].tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return sum(end - begin for pieces in self.sequences for begin, end in pieces)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest piece of a document in one sequence; positions needed."""
        return max(end - begin for pieces in self.sequences for begin, end in pieces)

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
    return {
        "input_ids": column("input_ids", nothing),
        "labels": column("labels", torch.full_like(nothing, IGNORED)),
        "position_ids": column("position_ids", torch.arange(longest)),
    }
