"""From a YAML file and ``field=value`` pairs to settings, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from oomb.train.errors import BadInput
from oomb.train.messages import messages
from oomb.train.settings import RunSettings


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which 1e-5 is a number, as in YAML 1.2, and a repeated field is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise BadInput(f"{key}: expected once, got it again in line {line}")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def read_settings(path: Path, overrides: Iterable[str] = ()) -> RunSettings:
    """Settings of a YAML file, with overrides such as ``optimizer.learning_rate=1e-5``.

    Raises:
        BadInput: a file that cannot be read, an unknown field, or a value that does not fit; every
            such field is named, on a line of its own.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise BadInput(f"{path}: expected a YAML file, got {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: expected YAML, got {_in_a_line(error)}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: expected YAML in UTF-8, got {error.reason}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: expected fields, got {type(values).__name__}")
    for override in overrides:
        _override(values, override)
    try:
        return RunSettings.model_validate(values)
    except ValidationError as error:
        raise BadInput("\n".join(messages(error))) from None


def _in_a_line(error: yaml.YAMLError) -> str:
    """What is wrong, and where."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return problem if mark is None else f"{problem} in line {mark.line + 1}"


def write_settings(settings: RunSettings, path: Path) -> None:
    """Every field, defaults included, such that :func:`read_settings` gives the same."""
    values = settings.model_dump(mode="json")
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _override(values: dict[str, Any], override: str) -> None:
    field, equals, text = override.partition("=")
    if not equals or not field:
        raise BadInput(f"{override}: expected field=value, such as optimizer.learning_rate=1e-5")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BadInput(
            f"{field}: expected a YAML value, got {text!r}: {_in_a_line(error)}"
        ) from error
    *sections, name = field.split(".")
    for section in sections:
        inner = values.get(section)
        if isinstance(inner, str):  # engine.attention: topk, before engine.attention.budget=32
            inner = {"type": inner}
        values[section] = values = inner if isinstance(inner, dict) else {}
    values[name] = value
