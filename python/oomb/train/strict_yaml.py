"""YAML of settings: numbers as people write them, no surprise, and a bound on what it may cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from oomb.train.errors import BadInput

MAX_BYTES = 1 << 18
MAX_DEPTH = 32
MAX_VALUES = 20_000  # with every alias written out
MAX_DIGITS = 100

_LARGEST = 1 << 63
# What PyYAML's constructors raise for a scalar that is not what its tag says.
_WRONG_SCALAR = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


def load_file(path: Path) -> Any:
    """What a YAML file says.

    Raises:
        BadInput: a file that cannot be read, is too large, or is not YAML.
    """
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: expected a YAML file, got {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise BadInput(f"{path}: expected at most {MAX_BYTES:,} bytes of YAML, got more")
    try:
        return load(text.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: expected YAML in UTF-8, got {error.reason}") from error


def load(text: str, name: str, *, expected: str = "YAML") -> Any:
    """What a YAML text says; ``name`` stands before every complaint.

    Raises:
        BadInput: it is not YAML, or nests, repeats itself or counts higher than settings do.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _expect_bounded(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise BadInput(f"{name}: expected {expected}, got {_in_a_line(error)}") from error
    except _Refused as error:
        raise BadInput(f"{name}: expected {error}") from None


class _Refused(Exception):
    """``expected ..., got ...`` without the first word; the file's name is put before it."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which 1e-5 is a number and a date is text, as in YAML 1.2; a field stands once."""

    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self.depth += 1
        self.values += 1
        line = self.peek_event().start_mark.line + 1
        if self.depth > MAX_DEPTH:
            raise _Refused(f"at most {MAX_DEPTH} levels, got more in line {line}")
        if self.values > MAX_VALUES:
            raise _Refused(f"at most {MAX_VALUES:,} values, got more in line {line}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = _tag(node) in ("!!int", "!!float")
        if is_number and isinstance(node.value, str) and len(node.value) > MAX_DIGITS:
            raise _Refused(f"numbers of at most {MAX_DIGITS} digits, got {_shown(node)}")
        try:
            value = super().construct_object(node, deep)
        except _WRONG_SCALAR as error:
            raise _Refused(f"a value of {_tag(node)}, got {_shown(node)}") from error
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise _Refused(f"numbers below 2**63, got {_shown(node)}")
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise _Refused(f"text without NUL and halves of characters, got {_shown(node)}")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _Refused(f"a value of {_tag(node)}, got {_shown(node)}")
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _Refused(f"names of fields, got {_shown(key_node)}")
            if _tag(key_node) == "!!merge":
                raise _Refused(
                    f"fields written out, got the merge key {_shown(key_node)}; an alias stands "
                    "for a whole value"
                )
            key = str(self.construct_object(key_node))
            if key in seen:
                # The field stands first in the message, as in every other.
                line = key_node.start_mark.line + 1
                raise BadInput(f"{key}: expected once, got it again in line {line}")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# A copy of the table: what is dropped here stays with everyone else's loader.
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def _expect_bounded(root: yaml.Node) -> None:
    """Count values as if every alias were written out, without writing one out."""
    sizes: dict[yaml.Node, int | None] = {}  # None: under way

    def size(node: yaml.Node) -> int:
        if node in sizes:
            known = sizes[node]
            if known is None:
                raise _Refused(f"values that end, got one inside itself, {_shown(node)}")
            return known
        sizes[node] = None
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        total = sizes[node] = 1 + sum(map(size, parts))
        return total

    if size(root) > MAX_VALUES:
        raise _Refused(f"at most {MAX_VALUES:,} values, got more; aliases count as written out")


def _tag(node: yaml.Node) -> str:
    return str(node.tag).replace("tag:yaml.org,2002:", "!!")


def _shown(node: yaml.Node) -> str:
    """A node as it is named in a message: its first letters, and its line."""
    kinds = {yaml.SequenceNode: "a list", yaml.MappingNode: "fields"}
    text = kinds.get(type(node)) or repr(str(node.value)[:40])
    return f"{text} in line {node.start_mark.line + 1}"


def _in_a_line(error: yaml.YAMLError) -> str:
    """What is wrong, and where."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return problem if mark is None else f"{problem} in line {mark.line + 1}"
