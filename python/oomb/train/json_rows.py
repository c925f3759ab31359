"""Rows of JSON files, one after the other: each value is what its file says, and nothing else.

Readers that make a table of a file guess a type for each column from its first rows: a text that
looks like a date becomes one, and what comes later must fit. Here rows are read by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fsspec.compression import compr  # torch and datasets need it too
from fsspec.utils import infer_compression

from oomb.train.chat import kind_of_value
from oomb.train.errors import BadInput

_MARK = b"\xef\xbb\xbf"  # some editors begin a file with it
_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def json_rows(path: str) -> Iterator[dict[str, Any]]:
    """Objects of a file: one a line, or an array of them, or each over several lines.

    Memory holds one line, or the whole file where a value is an array or longer than a line.

    Raises:
        BadInput: something else stands in it.
    """
    with open(path, "rb") as raw:
        # Where data.format says what a file is, its name may end in .gz or .zst.
        lines = enumerate(compr[infer_compression(path)](raw, mode="rb"), start=1)
        for number, line in lines:
            begins = line.removeprefix(_MARK).strip()
            if begins[:1] == b"[" or begins == b"{":
                line += b"".join(more for _, more in lines)
            yield from _objects(line, number, path)


def _objects(line: bytes, number: int, path: str) -> Iterator[dict[str, Any]]:
    """Objects of some text that begins at a line, or those of an array."""
    try:
        text = line.removeprefix(_MARK if number == 1 else b"").decode().rstrip()
        values = list(_values(text))
        if _SURROGATE.search(text) is not None:  # most are pairs, which are characters
            json.dumps(values, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line_number = number + error.lineno - 1
        raise _bad(path, line_number, f"{error.msg}, at character {error.colno}") from error
    except UnicodeEncodeError as error:
        raise _bad(path, number, "half of a surrogate pair, which is no character") from error
    except UnicodeDecodeError as error:
        raise _bad(path, number, f"no UTF-8, {error.reason}") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond all measure
        raise _bad(path, number, str(error)) from error
    for value in values:
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise _bad(path, number, f"expected an object, got {kind_of_value(row)}")
            yield row


def _values(text: str) -> Iterator[Any]:
    decoder, place = json.JSONDecoder(), _behind_space(text, 0)
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        place = _behind_space(text, place)
        yield value


def _behind_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _bad(path: str, line: int, reason: str) -> BadInput:
    return BadInput(f"data: expected JSONL, got {path}: line {line}: {reason}")
