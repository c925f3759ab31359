"""Documents of files and tables, read in pieces that a tokenizer can take.

Tokenizers slow down or hang on texts of many megabytes. A document is therefore read as segments;
each carries a little of the text before and after it, so that the tokens at its borders are those
of the whole document (see :mod:`oomb.train.tokenise`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TypedDict

from oomb.train.errors import BadInput
from oomb.train.rows import Row, RowRule
from oomb.train.sources import Source, rows

SEGMENT = 1 << 17  # characters, or tokens of a document that has its tokens
OVERLAP = 2048  # characters before and after; longer than any word, number or run of spaces

_ROWS_PER_FILE = 1 << 40
_FIRST_ROWS = 8
_BORDER = re.compile(r".*\s(?=\S)", re.DOTALL)


class Segment(TypedDict):
    """Characters [start, end) of ``text`` belong to it. ``last``: the document ends with it.

    Attributes:
        spans: characters of ``text`` whose tokens are predicted; None: all of them.
        complete: the text has its begin and end tokens.
        input_ids: tokens, where the document has its own instead of a text.
        counted: which of those are predicted; None: all of them.
    """

    document: int
    text: str
    start: int
    end: int
    last: bool
    spans: list[list[int]] | None
    complete: bool
    input_ids: list[int]
    counted: list[bool] | None


def segments(sources: list[tuple[int, Source]], rule: RowRule) -> Iterator[Segment]:
    """Segments of numbered files, in order. ``document`` is unique over all of them.

    Raises:
        BadInput: a file is not what its format says, or a row not what the rule says.
    """
    for number, source in sources:
        for place, row in enumerate(_documents(source, rule)):
            yield from _segments_of(number * _ROWS_PER_FILE + place, row)


def check_first_rows(sources: Iterable[Source], rule: RowRule) -> None:
    """Read what stands first in each file: whether it can be opened, its columns, its types.

    Raises:
        BadInput: as :func:`segments` would, later.
    """
    for source in sources:
        for row in islice(_documents(source, rule), _FIRST_ROWS):
            for _ in islice(row.blocks, 1):
                pass


def _segments_of(document: int, row: Row) -> Iterator[Segment]:
    ids, counted = row.input_ids, row.counted
    for begin in range(0, len(ids), SEGMENT):
        behind = min(begin + SEGMENT, len(ids))
        some = None if counted is None else counted[begin:behind]
        yield Segment(
            document=document,
            text="",
            start=0,
            end=0,
            last=behind == len(ids),
            spans=None,
            complete=True,
            input_ids=ids[begin:behind],
            counted=some,
        )
    done = 0
    for text, start, end, last in cut(row.blocks):
        first, behind = done - start, done - start + len(text)
        spans = row.spans
        if spans is not None:
            spans = [
                (max(a, first) - first, min(b, behind) - first)
                for a, b in spans
                if a < behind and b > first
            ]
        yield Segment(
            document=document,
            text=text,
            start=start,
            end=end,
            last=last,
            spans=None if spans is None else [list(span) for span in spans],
            complete=row.complete,
            input_ids=[],
            counted=None,
        )
        done += end - start


def cut(
    blocks: Iterable[str], size: int = SEGMENT, overlap: int = OVERLAP
) -> Iterator[tuple[str, int, int, bool]]:
    """(text, start, end, last) of a document's segments; nothing for an empty document.

    A border lies before a word where there is one among the last ``overlap`` characters.
    """
    text, start = "", 0
    for block in blocks:
        text += block
        while len(text) >= start + size + overlap:
            end = start + size
            before_word = _BORDER.match(text, end - overlap, end + 1)
            if before_word is not None:
                end = before_word.end()
            yield text[: end + overlap], start, end, False
            text, start = text[end - overlap :], overlap
    if text:
        yield text, start, len(text), True


def _documents(source: Source, rule: RowRule) -> Iterator[Row]:
    if source.format == "text":
        if rule.kind not in ("auto", "text"):
            raise BadInput(
                f"data.kind: expected 'auto' or 'text' for the text file {source.name}, got "
                f"{rule.kind!r}; 'auto' tells tables by their columns, beside text files too"
            )
        yield Row(_blocks_of_file(source.path))
        return
    kind = None
    for number, values in enumerate(rows(source)):
        if kind is None:
            kind = rule.kind_of(values, source)
        row = rule.row(kind, values, number, source)
        yield replace(row, blocks=_blocks("".join(row.blocks)))


def _blocks(text: str) -> Iterable[str]:
    return (text[begin : begin + SEGMENT] for begin in range(0, len(text), SEGMENT))


def _blocks_of_file(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            while block := stream.read(SEGMENT):
                yield block
    except (UnicodeDecodeError, OSError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error.strerror
        raise BadInput(f"data: expected UTF-8 text, got {path}: {reason}") from error
