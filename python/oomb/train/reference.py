"""Lists of every setting for docs/train.md, made from the settings themselves.

python -m oomb.train.reference
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from oomb.train.section import Section
from oomb.train.settings import RunSettings

_wrap = textwrap.TextWrapper(
    100,
    initial_indent="- ",
    subsequent_indent="  ",
    break_long_words=False,
    break_on_hyphens=False,
)
_WORDS = {str: "text", int: "int", float: "number", bool: "true, false", type(None): "null"}


def lists() -> str:
    """Markdown: a list per section, an item per field, in lines of 100 columns."""
    return "\n".join(_list("", RunSettings))


def _list(section: str, kind: type[Section]) -> Iterator[str]:
    if section:
        yield f"\n### {section}\n"
    inner: list[tuple[str, type[Section]]] = []
    for name, field in kind.model_fields.items():
        sections = [s for s in _members(field.annotation) if _is_section(s)]
        sections += [s for s in _in_lists(field.annotation) if _is_section(s)]
        several = len(sections) > 1
        for member in sections:
            if any(member is known for _, known in inner):
                continue  # of the field before it
            title = f"{section}.{name}" if section else name
            chosen = get_args(member.model_fields["type"].annotation)[0] if several else None
            inner.append((f"{title}: {chosen}" if several else title, member))
        if section and ":" in section and name == "type":
            continue
        meaning = field.description or f"the section [{name}](#{name})"
        takes = "; ".join(filter(None, [_values(field, sections), _default(field)]))
        yield _wrap.fill(f"`{name}` ({takes}): {meaning}")
    for title, member in inner:
        if list(member.model_fields) != ["type"]:
            yield from _list(title, member)


def _members(annotation: Any) -> list[Any]:
    """The types of a union, or the one type."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _in_lists(annotation: Any) -> list[Any]:
    """What the lists among the members of a union hold."""
    lists = [kind for kind in _members(annotation) if get_origin(kind) is list]
    return [member for kind in lists for member in _members(get_args(kind)[0])]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _values(field: FieldInfo, sections: list[Any]) -> str:
    if _in_lists(field.annotation):
        sections = []
    if sections:
        optional = type(None) in _members(field.annotation)
        return "fields, null" if optional else "fields"
    return ", ".join(dict.fromkeys(_word(member) for member in _members(field.annotation)))


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        parts = (_word(member) for member in _members(get_args(kind)[0]))
        return f"list of {' or '.join(dict.fromkeys(parts))}"
    if get_origin(kind) is dict:
        return "name: value"
    return "fields" if _is_section(kind) else _WORDS[kind]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "default null"
    if isinstance(value, Section):
        kind = getattr(value, "type", None)
        return f"default `{kind}`" if kind else ""
    return f"default `{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(lists())
