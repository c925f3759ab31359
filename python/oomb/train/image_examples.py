"""Conversations with images as examples: each is whole, its images are files until it is used."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oomb.train.chat import Span
from oomb.train.errors import BadInput
from oomb.train.generated import generated
from oomb.train.image_files import decoded, measured
from oomb.train.image_parts import has_images, taken_out
from oomb.train.processor import Processing
from oomb.train.rows import RowRule
from oomb.train.sources import Source, rows
from oomb.train.tokenise import inside

if TYPE_CHECKING:
    from datasets import Dataset

_FIRST_ROWS = 8
_KINDS = ("messages", "completion")


class ImageRule:
    """How a row of a table becomes an example of text and images.

    A text's placeholders grow to what the processor writes for images of their sizes, and spans of
    characters move with them; so tokens and labels are known before a pixel is decoded.

    Args:
        read: how rows become text.
    """

    def __init__(self, read: RowRule, processing: Processing) -> None:
        self._read, self.processing = read, processing

    def __reduce__(self) -> tuple[Any, ...]:
        """All that examples depend on besides rows and files, of which caches make their key."""
        return str, (f"{self._read!r} {self.processing.identity}",)

    def kind_of(self, values: dict[str, Any], source: Source) -> str:
        """The kind of a file's rows, from its first.

        Raises:
            BadInput: these are no conversations.
        """
        kind = self._read.kind_of(values, source)
        if kind not in _KINDS:
            raise BadInput(
                f"data.kind: expected messages or completion beside images, got {kind!r} in "
                f"{source.name}"
            )
        return kind

    def example(
        self, kind: str, values: dict[str, Any], number: int, source: Source
    ) -> dict[str, Any]:
        """A row's text as the template writes it, files, tokens, and which are predicted.

        Raises:
            BadInput: the row does not have what its kind needs, or a file cannot be read.
        """
        place = f"row {number} of {source.name}"
        files: list[Path] = []
        folder = None if source.hub is not None else Path(source.path).absolute().parent
        row = self._read.conversation(
            kind, values, place, partial(taken_out, folder=folder, files=files)
        )
        text, spans = "".join(row.blocks), row.spans or []
        pieces = text.split(self.processing.placeholder)
        if len(pieces) != len(files) + 1:
            raise BadInput(
                f"data.chat_template: expected one that writes {self.processing.placeholder!r} for "
                f"each image and for nothing else, got {len(pieces) - 1} of them for {len(files)} "
                f"images in {place}"
            )
        try:
            found = [measured(file) for file in files]
        except ValueError as error:
            raise BadInput(f"data: {error}, in {place}") from error
        try:
            written = [self.processing.written(each.width, each.height) for each in found]
        except Exception as error:  # whatever the processor makes of a size
            raise _not_taken(place, error) from error
        whole, spans, of_images = grown(pieces, written, len(self.processing.placeholder), spans)
        encoding = self.processing.tokenizer.encode(whole, add_special_tokens=False)
        shows = inside(encoding.offsets, [list(span) for span in of_images])
        said = inside(encoding.offsets, [list(span) for span in spans])
        counted = [a and not b for a, b in zip(said, shows, strict=True)]
        return {
            "place": place,
            "text": text,
            "files": [str(file) for file in files],
            "measured": [list(each) for each in found],
            "input_ids": encoding.ids,
            "counted": counted,
            "num_shown": sum(shows),
            "num_targets": sum(counted[1:]),
        }


def grown(
    pieces: Sequence[str], written: Sequence[str], width: int, spans: Sequence[Span]
) -> tuple[str, list[Span], list[Span]]:
    """A text whose placeholders have given way to longer texts.

    Args:
        pieces: of the text, between its placeholders.
        written: what stands between them instead.
        width: of a placeholder.
        spans: of the text as it was.

    Returns:
        The text, ``spans`` in it, and the spans of ``written``.
    """
    before, after, shown = [0], [0], []
    for piece, text in zip(pieces, written, strict=False):  # behind the last stands nothing
        begin = after[-1] + len(piece)
        shown.append((begin, begin + len(text)))
        before.append(before[-1] + len(piece) + width)
        after.append(begin + len(text))

    def moved(place: int) -> int:
        piece = bisect.bisect_right(before, place) - 1
        return after[piece] + min(place - before[piece], len(pieces[piece]))

    whole = "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair)
    return whole, [(moved(begin), moved(end)) for begin, end in spans], shown


def some_have_images(sources: Iterable[Source], rule: RowRule) -> bool:
    """Whether one of the first rows of a table has an image among its messages."""
    for source in sources:
        if source.format == "text":
            continue
        for values in islice(rows(source), _FIRST_ROWS):
            columns = [*rule.columns("messages"), *rule.columns("completion")]
            if any(has_images(values.get(name)) for name in columns):
                return True
    return False


def check_first_images(sources: Iterable[Source], rule: ImageRule) -> None:
    """Run what stands first in each file through the processor.

    Raises:
        BadInput: as :func:`image_examples` or a call of the engine would, later.
    """
    for source in sources:
        for example in islice(_examples([source], rule), _FIRST_ROWS):
            processed(rule.processing, example)


def processed(processing: Processing, example: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the processor makes of an example, its files decoded; nothing where it has none.

    Raises:
        BadInput: a file cannot be decoded, or its tokens are no longer those of the example.
    """
    if not example["files"]:
        return {}
    try:
        images = [decoded(Path(file)) for file in example["files"]]
    except ValueError as error:
        raise BadInput(f"data: {error}, in {example['place']}") from error
    try:
        made = processing(example["text"], images)
    except BadInput:
        raise
    except Exception as error:  # whatever the processor makes of the example
        raise _not_taken(example["place"], error) from error
    ids = made.pop("input_ids")[0]
    if not torch.equal(ids, torch.as_tensor(example["input_ids"])):
        raise BadInput(
            f"data: expected images of the sizes they had when the run began, got others, in "
            f"{example['place']}"
        )
    return made


def _not_taken(place: str, error: Exception) -> BadInput:
    reason = str(error).partition("\n")[0][:300] or type(error).__name__
    return BadInput(
        f"data: expected text and images that the processor takes, got others in {place}: {reason}"
    )


def image_examples(
    field: str, sources: Sequence[Source], rule: ImageRule, cache_dir: str | None
) -> Dataset:
    """All examples of some files, from the cache where neither rows nor images have changed.

    Raises:
        BadInput: a row is not what it should be.
    """
    import datasets  # heavy, and optional

    # Files of examples are absolute: a copy of a folder has examples of its own.
    folders = "\n".join(str(Path(each.path).absolute().parent) for each in sources if not each.hub)

    def of(stamp: str) -> Dataset:
        number = datasets.Value("int64")
        features = datasets.Features(
            place=datasets.Value("string"),
            text=datasets.Value("large_string"),
            files=datasets.List(datasets.Value("string")),
            measured=datasets.List(datasets.List(number)),
            input_ids=datasets.List(datasets.Value("int32")),
            counted=datasets.List(datasets.Value("bool")),
            num_shown=number,
            num_targets=number,
        )
        arguments = {"sources": list(sources), "rule": rule, "stamp": folders + stamp}
        return generated(field, _examples, arguments, cache_dir, features)

    found = of("")
    now = _stamp(found)
    return found if now is None else of(now)


def _stamp(examples: Dataset) -> str | None:
    """What images have changed to; None: they are as their examples say."""
    files, known = examples["files"], examples["measured"]
    changed = []
    for some, sizes in zip(files, known, strict=True):
        for file, size in zip(some, sizes, strict=True):
            try:
                now = list(measured(Path(file)))
            except ValueError:
                now = []
            if now != size:
                changed.append(f"{file} {now}")
    return "\n".join(changed) or None


def _examples(sources: list[Source], rule: ImageRule, stamp: str = "") -> Iterator[dict[str, Any]]:
    """``stamp``: makes another key of the cache."""
    for source in sources:
        kind = None
        for number, values in enumerate(rows(source)):
            if kind is None:
                kind = rule.kind_of(values, source)
            yield rule.example(kind, values, number, source)
