"""From a YAML file and ``field=value`` pairs to settings, with errors that name the field."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from oomb.replacing import replace_file
from oomb.train.errors import BadInput
from oomb.train.messages import messages, shown
from oomb.train.settings import RunSettings
from oomb.train.strict_yaml import load, load_file

# Sections of several types, for which the type's name alone is short.
_NAMED_BY_TYPE = ("engine.attention", "engine.backward")


def read_settings(path: Path, overrides: Iterable[str] = ()) -> RunSettings:
    """Settings of a YAML file, with overrides such as ``optimizer.learning_rate=1e-5``.

    Raises:
        BadInput: a file that cannot be read, an unknown field, or a value that does not fit; every
            such field is named, on a line of its own.
    """
    values = load_file(path)
    if not isinstance(values, dict):
        raise BadInput(f"{path}: expected fields, got {type(values).__name__}")
    for override in overrides:
        _override(values, override)
    try:
        return RunSettings.model_validate(values)
    except ValidationError as error:
        raise BadInput("\n".join(messages(error))) from None


def write_settings(settings: RunSettings, path: Path) -> None:
    """Every field, defaults included, such that :func:`read_settings` gives the same."""
    values = settings.model_dump(mode="json")
    replace_file(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())


def _override(values: dict[str, Any], override: str) -> None:
    field, equals, text = override.partition("=")
    if not equals or not field:
        raise BadInput(f"{override}: expected field=value, such as optimizer.learning_rate=1e-5")
    value = load(text, field, expected="a YAML value")
    *sections, name = field.split(".")
    for number, section in enumerate(sections, 1):
        inner, place = values.get(section), ".".join(sections[:number])
        if isinstance(inner, str) and place in _NAMED_BY_TYPE:
            inner = {"type": inner}  # engine.attention: topk, before engine.attention.budget=32
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise BadInput(
                f"{field}: expected fields in {place}, got {shown(inner)}; write {place} itself "
                f"as fields to give it {field.removeprefix(place + '.')!r}"
            )
        values[section] = values = {**inner}  # an alias may share it
    values[name] = value
