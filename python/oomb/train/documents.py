"""Documents of text, JSONL and Parquet files, read in pieces that a tokenizer can take.

Tokenizers slow down or hang on texts of many megabytes. A document is therefore read as segments;
each carries a little of the text before and after it, so that the tokens at its borders are those
of the whole document (see :mod:`oomb.train.tokenise`).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from oomb.nearest import nearest
from oomb.train.errors import BadInput

SEGMENT = 1 << 17  # characters
OVERLAP = 2048  # characters before and after; longer than any word, number or run of spaces

_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_TEXT_SUFFIXES = {"", ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".py"}
_ROWS_PER_FILE = 1 << 40
_BORDER = re.compile(r".*\s(?=\S)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """A file of documents. Size and time belong to it, so that a changed file is read anew."""

    path: str
    format: str
    text_field: str
    size: int
    modified_ns: int


class Segment(TypedDict):
    """Characters [start, end) of ``text`` belong to it. ``last``: the document ends with it."""

    document: int
    text: str
    start: int
    end: int
    last: bool


def find_sources(field: str, paths: Iterable[str], format: str, text_field: str) -> list[Source]:
    """Files of the paths, folders and patterns of a setting, in its order, each folder's by name.

    Raises:
        BadInput: a path leads to no file, or to one that is empty or cannot be read.
    """
    sources = []
    for path in paths:
        for file in _files(field, path, format):
            found = format if format != "auto" else _SUFFIXES.get(file.suffix, "text")
            try:
                with file.open("rb") as stream:
                    status = os.fstat(stream.fileno())
            except OSError as error:
                raise BadInput(f"{field}: expected a file, got {file}: {error.strerror}") from error
            sources.append(Source(str(file), found, text_field, status.st_size, status.st_mtime_ns))
    if all(source.size == 0 for source in sources):
        raise BadInput(f"{field}: expected text, got empty files: {', '.join(paths)}")
    return sources


def _files(field: str, path: str, format: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        known = _SUFFIXES.keys() | _TEXT_SUFFIXES
        files = [
            file
            for file in sorted(place.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(place).parts)
            and (format != "auto" or file.suffix in known)
        ]
    elif glob.has_magic(path) and not place.exists():
        files = [Path(file) for file in sorted(glob.glob(str(place), recursive=True))]
        files = [file for file in files if file.is_file()]
    else:
        if not place.exists():
            siblings = [file.name for file in place.parent.glob("*")]
            near = nearest(place.name, siblings) if siblings else ""
            raise BadInput(f"{field}: expected a file, got {path}, which does not exist{near}")
        files = [place]
    if not files:
        raise BadInput(f"{field}: expected files, got {path}, which leads to none")
    return files


def segments(sources: list[tuple[int, Source]]) -> Iterator[Segment]:
    """Segments of numbered files, in order. ``document`` is unique over all of them.

    Raises:
        BadInput: a file is not what its format says, or a row has no text.
    """
    for number, source in sources:
        for row, blocks in enumerate(_documents(source)):
            for text, start, end, last in cut(blocks):
                document = number * _ROWS_PER_FILE + row
                yield Segment(document=document, text=text, start=start, end=end, last=last)


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


def _documents(source: Source) -> Iterator[Iterable[str]]:
    if source.format == "text":
        yield _blocks_of_file(source.path)
        return
    for row, values in enumerate(_rows(source)):
        if source.text_field not in values:
            near = nearest(source.text_field, values) or f" (columns: {', '.join(values)})"
            raise BadInput(
                f"data.text_field: expected a column of {source.path}, got "
                f"{source.text_field!r}{near}"
            )
        text = values[source.text_field]
        if not isinstance(text, str):
            raise BadInput(
                f"data.text_field: expected text in column {source.text_field!r}, got "
                f"{type(text).__name__} in row {row} of {source.path}"
            )
        yield (text[begin : begin + SEGMENT] for begin in range(0, len(text), SEGMENT))


def _blocks_of_file(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8", newline="") as stream:
        try:
            while block := stream.read(SEGMENT):
                yield block
        except UnicodeDecodeError as error:
            raise BadInput(f"data: expected UTF-8 text, got {path}: {error.reason}") from error


def _rows(source: Source) -> Iterator[dict[str, Any]]:
    import datasets  # heavy, and optional

    builder = "json" if source.format == "jsonl" else "parquet"
    rows = None
    try:
        # Streaming: rows go into one cache only, that of their tokens.
        rows = datasets.load_dataset(builder, data_files=source.path, split="train", streaming=True)
        yield from rows
    except GeneratorExit:
        raise
    except Exception as error:  # datasets raises what its readers raise
        name = {"jsonl": "JSONL", "parquet": "Parquet"}[source.format]
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"data: expected {name}, got {source.path}: {reason}") from error
