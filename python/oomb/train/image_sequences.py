"""Sequences of whole examples with images, which are decoded when their sequence is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oomb.train.errors import BadInput
from oomb.train.image_examples import processed
from oomb.train.processor import Processing
from oomb.train.rows import IGNORED
from oomb.train.sequences import packed

if TYPE_CHECKING:
    from datasets import Dataset

_SAMPLES = 256  # examples that stand for all
_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")  # [1, tokens]; others have a row an image


class ImageSequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences as a Trainer takes them.

    An item has ``input_ids``, ``labels`` and ``document_ids``, [tokens] int64, and where it has
    images what the processor makes of them. Positions are the model's to count. No targets are an
    example's first token, what shows an image, and what is not counted.

    Args:
        examples: as :func:`oomb.train.image_examples.image_examples` makes them.
        sequences: numbers of the examples of each.

    Attributes:
        left_out: how many examples were longer than the context.
    """

    def __init__(
        self,
        examples: Dataset,
        sequences: list[list[int]],
        processing: Processing,
        left_out: int = 0,
    ) -> None:
        self.sequences, self.left_out = sequences, left_out
        self._examples, self._processing = examples, processing
        self._lengths = _lengths(examples)
        self._shown = np.array(examples["num_shown"], dtype=np.int64)
        self._targets = np.array(examples["num_targets"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        parts = [
            self._document(self._examples[number], place)
            for place, number in enumerate(self.sequences[index])
        ]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _joined(name, parts) for name in names}

    def _document(self, example: dict[str, Any], place: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(example["input_ids"], dtype=torch.int64)
        counted = torch.tensor(example["counted"], dtype=torch.bool)
        counted[0] = False
        part = {
            "input_ids": ids,
            "labels": ids.masked_fill(~counted, IGNORED),
            "document_ids": torch.full_like(ids, place),
        }
        made = processed(self._processing, example)
        for name in _OF_TOKENS:
            if name in made:
                made[name] = made[name][0]
        return part | made

    def subset(self, indices: Sequence[int]) -> ImageSequences:
        chosen = [self.sequences[index] for index in indices]
        return ImageSequences(self._examples, chosen, self._processing, self.left_out)

    def identity(self) -> str:
        """Short text that another set of sequences does not share, from a sample of the examples.

        Of an image its size in pixels and bytes counts, not its name.
        """
        numbers = np.array([number for sequence in self.sequences for number in sequence])
        digest = hashlib.sha256(numbers.tobytes())
        for number in numbers[:: -(-len(numbers) // _SAMPLES)].tolist():
            example = self._examples[number]
            sizes = [size[:3] for size in example["measured"]]
            known = example["text"], sizes, example["input_ids"], example["counted"]
            digest.update(repr(known).encode())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return sum(self._of_each(self._lengths))

    @property
    def num_targets(self) -> int:
        return sum(self._of_each(self._targets))

    @property
    def num_images(self) -> int:
        files = self._examples["files"]
        return sum(len(files[number]) for sequence in self.sequences for number in sequence)

    @property
    def most_shown(self) -> int:
        """Tokens of one sequence that show images, at most."""
        return max(self._of_each(self._shown))

    @property
    def longest_document(self) -> int:
        return max(int(self._lengths[sequence].max()) for sequence in self.sequences)

    @property
    def longest(self) -> int:
        return max(self._of_each(self._lengths))

    def _of_each(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        return [int(numbers[sequence].sum()) for sequence in self.sequences]


def image_sequences(
    field: str, examples: Dataset, processing: Processing, context: int, *, packs: bool
) -> ImageSequences:
    """Examples of at most ``context`` tokens, one to a sequence or several; none is cut.

    Raises:
        BadInput: none is short enough, or none of them has a token to predict.
    """
    lengths = _lengths(examples)
    short = lengths <= context
    if not short.any():
        least = int(lengths.min()) if len(lengths) else 0
        raise BadInput(
            f"{field}: expected examples of at most {context:,} tokens, the context, images "
            f"included, got none of {len(lengths):,}; the shortest has {least:,}"
        )
    useful = np.flatnonzero(short & (np.array(examples["num_targets"]) > 0)).tolist()
    if not useful:
        raise BadInput(
            f"{field}: expected tokens to predict (an assistant's turn, a completion), got none "
            f"among {int(lengths[short].sum()):,}"
        )
    sequences = [[number] for number in useful]
    if packs:
        ends = np.cumsum(lengths[useful]).tolist()
        begins = [0, *ends[:-1]]
        numbers = dict(zip(begins, useful, strict=True))
        pieces = packed(list(zip(begins, ends, strict=True)), context)
        sequences = [[numbers[begin] for begin, _ in sequence] for sequence in pieces]
    return ImageSequences(examples, sequences, processing, int((~short).sum()))


def collate_images(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Items as one batch [sequences, tokens], their images behind one another.

    Padding is a document of its own, not counted.
    """
    longest = max(len(item["input_ids"]) for item in items)
    padding = {"labels": IGNORED, "document_ids": -1}
    batch = {}
    for name in dict.fromkeys(name for item in items for name in item):
        if name in ("input_ids", *padding, *_OF_TOKENS):
            column = [item.get(name, torch.zeros_like(item["input_ids"])) for item in items]
            batch[name] = torch.stack([_padded(x, longest, padding.get(name, 0)) for x in column])
        else:
            batch[name] = _joined(name, items)
    return batch


def _padded(values: torch.Tensor, length: int, padding: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=padding)


def _joined(name: str, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Of all parts, one behind the other; one without images has zeros for each of its tokens."""
    if name in _OF_TOKENS:
        return torch.cat([part.get(name, torch.zeros_like(part["input_ids"])) for part in parts])
    given = [part[name] for part in parts if name in part]
    shapes = {tuple(x.shape[1:]) for x in given}
    if len(shapes) > 1:
        raise BadInput(
            f"training.batch_size: expected a processor whose {name} of several examples can be "
            f"joined, got shapes {', '.join(map(str, sorted(shapes)))}; one example a sequence "
            "(data.arrange=windows) and a batch of 1 need no joining"
        )
    return torch.cat(given)


def _lengths(examples: Dataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    import pyarrow.compute  # optional

    column = examples.data.table.column("input_ids")
    lengths: np.ndarray[Any, np.dtype[np.int64]] = (
        pyarrow.compute.list_value_length(column).to_numpy().astype(np.int64)
    )
    return lengths
