"""Pydantic's complaints in the form ``<field>: expected ..., got ...``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from oomb.nearest import nearest
from oomb.train.section import Section
from oomb.train.settings import RunSettings

_SCALARS = ("str", "int", "float", "bool", "list[str]")
_LONGEST = 80  # characters
_OWN_MESSAGE = re.compile(r"[\w.]+( \+ \w+)?: expected")


def messages(error: ValidationError) -> list[str]:
    """One line per field that does not fit."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        names, sections = _locate(problem["loc"])
        field = ".".join(_cut(str(name)) for name in names)
        line = _line(field, names, sections, problem)
        if field in lines and problem["type"].endswith("_type"):
            # A field of several types: each that was tried complains by itself.
            expected = line.partition(": expected ")[2].rpartition(", got ")[0]
            line = lines[field].replace(", got ", f" or {expected}, got ", 1)
        lines[field] = line
    # Of a field of several kinds the innermost complaint is about the kind that was meant.
    inner = {field.rpartition(".")[0] for field in lines if "." in field}
    return [line for field, line in lines.items() if field not in inner]


def _line(
    field: str, names: list[str | int], sections: list[type[Section]], problem: ErrorDetails
) -> str:
    kind, got, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(dict.fromkeys(name for s in sections for name in s.model_fields))
        near = nearest(str(names[-1]), known) or f"; known are {', '.join(known)}"
        return f"{field}: expected a known field, got {shown(names[-1])}{near}"
    if kind == "missing":
        return f"{field}: expected a value, got none"
    if kind == "value_error":
        message = str(context["error"])
        if not field:
            return message
        # A check of a whole section names the field inside it.
        return f"{field}{'.' if _OWN_MESSAGE.match(message) else ': '}{message}"
    if kind == "literal_error":
        near = nearest(str(got), re.findall(r"'([^']*)'", context["expected"]))
        return f"{field}: expected {context['expected']}, got {shown(got)}{near}"
    if kind.startswith("union_tag"):
        types = [name for s in sections for name in _types(s)]
        given = got.get("type") if isinstance(got, dict) else got
        near = nearest(str(given), types)
        return f"{field}.type: expected {' or '.join(map(repr, types))}, got {shown(given)}{near}"
    if kind in ("model_type", "model_attributes_type"):
        known = list(dict.fromkeys(name for s in sections for name in s.model_fields))
        return f"{field}: expected fields ({', '.join(known)}), got {shown(got)}"
    if kind == "too_short":
        return f"{field}: expected at least {context['min_length']} of them, got {shown(got)}"
    if kind == "string_too_short":
        return f"{field}: expected text, got ''"
    if kind == "string_too_long":
        return f"{field}: expected at most {context['max_length']:,} characters, got {len(got):,}"
    expected = problem["msg"].removeprefix("Input should be ")
    return f"{field}: expected {expected.removeprefix('a valid ')}, got {shown(got)}"


def shown(got: object) -> str:
    """A value as it is named in a message: what does not fit a line is cut."""
    return _cut(repr(got))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _locate(location: tuple[str | int, ...]) -> tuple[list[str | int], list[type[Section]]]:
    """Names that the user wrote, and the sections in which the last of them stands, or which it is.

    Pydantic puts the member of a union that it tried between them.
    """
    names: list[str | int] = []
    sections: list[type[Section]] = [RunSettings]
    for number, part in enumerate(location):
        last = number == len(location) - 1
        fields = [s.model_fields[str(part)] for s in sections if part in s.model_fields]
        tagged = [s for s in sections if part in _types(s)]
        if fields:
            sections = [section for field in fields for section in _sections_in(field)]
        elif tagged:
            sections = tagged
            continue
        elif part in [section.__name__ for section in sections]:
            continue  # one of several kinds, of which this one was tried
        elif last and (part in _SCALARS or "[" in str(part)):
            continue
        names.append(part)
    return names, sections


def _types(section: type[Section]) -> tuple[str, ...]:
    """What the field ``type`` may be, in a section that is one of several."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field else ()


def _sections_in(field: FieldInfo) -> list[type[Section]]:
    def inside(annotation: Any) -> Iterator[type[Section]]:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield annotation
        for argument in get_args(annotation):
            yield from inside(argument)

    return list(inside(field.annotation))
