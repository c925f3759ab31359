"""Calls of ``oomb._C`` before their nouns are made, so that any part of one can be another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Noun:
    """A noun of the extension: its class and what it is made of."""

    kind: str
    fields: Arguments


def noun(kind: str, **fields: Any) -> Noun:
    return Noun(kind, fields)


def leaves(arguments: Mapping[str, Any]) -> list[str]:
    """Paths of the values in nouns, and of the others: ``chunk.q``, ``stream``."""
    paths = []
    for name, value in sorted(arguments.items()):
        inside = leaves(value.fields) if isinstance(value, Noun) else []
        paths += [f"{name}.{path}" for path in inside] or [name]
    return paths


def value_at(arguments: Mapping[str, Any], path: str) -> Any:
    name, _, rest = path.partition(".")
    return value_at(arguments[name].fields, rest) if rest else arguments[name]


def with_other(arguments: Mapping[str, Any], path: str, value: Any) -> Arguments:
    """Arguments with another value at a path; nouns on the way are other ones too."""
    name, _, rest = path.partition(".")
    if rest:
        value = Noun(arguments[name].kind, with_other(arguments[name].fields, rest, value))
    return {**arguments, name: value}


def made(extension: Any, value: Any) -> Any:
    """A value whose nouns are the extension's."""
    if not isinstance(value, Noun):
        return value
    return getattr(extension, value.kind)(**all_made(extension, value.fields))


def all_made(extension: Any, arguments: Mapping[str, Any]) -> Arguments:
    return {name: made(extension, value) for name, value in arguments.items()}
