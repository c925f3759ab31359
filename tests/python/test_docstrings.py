"""Docstrings of public names tell every argument, field and error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import oomb
from oomb import hf, ops

CLASSES = [getattr(oomb, name) for name in oomb.__all__ if name != "__version__"]
RECORDS = [kind for kind in CLASSES if is_dataclass(kind) and fields(kind)]
METHODS = [
    method
    for name, method in vars(oomb.Engine).items()
    if inspect.isfunction(method) and not name.startswith("_")
]
FUNCTIONS = [getattr(ops, name) for name in ops.__all__]


def named(text: str) -> set[str]:
    """What stands before a colon at the beginning of a line, or is set as code."""
    before_colons = re.findall(r"^\s*([\w, ]+):", text, re.M)
    return {n.strip() for names in before_colons for n in names.split(",")} | set(
        re.findall(r"`(\w+)", text)
    )


@pytest.mark.parametrize("kind", [*CLASSES, *(getattr(hf, n) for n in hf.__all__)])
def test_every_class_has_one(kind: type) -> None:
    own = vars(kind).get("__doc__") or ""
    assert len(own) > 30 and not own.startswith(f"{kind.__name__}(")  # what dataclass writes


@pytest.mark.parametrize("kind", RECORDS)
def test_fields(kind: Any) -> None:
    missing = {field.name for field in fields(kind)} - named(kind.__doc__)
    assert not missing


@pytest.mark.parametrize("function", [*METHODS, *FUNCTIONS])
def test_arguments(function: Callable[..., Any]) -> None:
    parameters = set(inspect.signature(function).parameters) - {"self"}
    text = function.__doc__ or ""
    if function.__name__ in ("evaluate", "two_pass"):
        text += oomb.Engine.forward_backward.__doc__ or ""
    elif function.__name__ == "load_state_dict":
        parameters -= {"state"}  # said in its first line
    assert text
    assert not parameters - named(text)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_of_operations(function: Callable[..., Any]) -> None:
    assert "Raises:\n        ValueError" in (function.__doc__ or "")
