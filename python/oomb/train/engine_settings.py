"""The ``engine`` section: :class:`oomb.Config` itself, read field by field."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_type_hints

from pydantic import BeforeValidator, Field, create_model, model_validator

from oomb.config import AllChunks, Config, Dense, SampledChunks, TopKPages, TruncatedChunks
from oomb.train.section import Section

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n      .*)*)", re.MULTILINE)
_AS_MARKDOWN = (
    (re.compile(r"\s+"), " "),
    (re.compile(r":\w+:`([^`]*)`"), r"`\1`"),
    (re.compile(r"``\"?([^`\"]*)\"?``"), r"`\1`"),
)
_AS_YAML = {"None": "null", "True": "`true`", "False": "`false`"}


class _Mirror(Section):
    """A section with the fields, types, defaults, descriptions and checks of a dataclass."""

    _made: ClassVar[type]

    @model_validator(mode="after")
    def _check(self) -> _Mirror:
        self.made()
        return self

    def made(self) -> Any:
        """The dataclass with these values.

        Raises:
            ValueError: a value that it does not take.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "type"}
        return self._made(
            **{name: v.made() if isinstance(v, _Mirror) else v for name, v in values.items()}
        )


def _mirror(name: str, made: type, **special: Any) -> type[_Mirror]:
    """A section for a dataclass; ``special``: fields that are not as there, as (type, field)."""
    meanings = _meanings(made)
    types = get_type_hints(made)
    given: dict[str, Any] = dict(special)
    for one in fields(made):
        default = one.default if one.default is not MISSING else ...
        meaning = Field(default, description=meanings[one.name])
        given.setdefault(one.name, (types[one.name], meaning))
    order = [*(name for name in ("type",) if name in given), *(one.name for one in fields(made))]
    section = create_model(name, __base__=_Mirror, **{one: given[one] for one in order})
    section._made = made
    return section


def _meanings(made: type) -> dict[str, str]:
    """Descriptions of the attributes in a docstring, in Markdown and with YAML's words."""
    text = inspect.getdoc(made) or ""
    _, _, attributes = text.partition("Attributes:\n")
    found = {}
    for name, line in _ATTRIBUTE.findall(attributes):
        for pattern, replacement in _AS_MARKDOWN:
            line = pattern.sub(replacement, line)
        for word, other in _AS_YAML.items():
            line = re.sub(rf"\b{word}\b", other, line)
        found[name] = line[:1].upper() + line[1:]
    return found


def _type_alone(value: Any) -> Any:
    """``attention: topk`` is short for ``attention: {type: topk}``."""
    return {"type": value} if isinstance(value, str) else value


def _is(name: str, *, default: bool = False) -> tuple[Any, Any]:
    return Literal[name], name if default else ...


DenseSettings = _mirror("DenseSettings", Dense, type=_is("dense", default=True))
TopKSettings = _mirror("TopKSettings", TopKPages, type=_is("topk"))
AllSettings = _mirror("AllSettings", AllChunks, type=_is("all", default=True))
SampledSettings = _mirror("SampledSettings", SampledChunks, type=_is("sampled"))
TruncatedSettings = _mirror("TruncatedSettings", TruncatedChunks, type=_is("truncated"))


def _one_of(exact: type[_Mirror], *others: type[_Mirror], description: str) -> tuple[Any, Any]:
    members = (exact, *others)
    either: Any = Union[members]  # noqa: UP007  made here, so no checker can know it
    by_type = Annotated[either, Field(discriminator="type")]
    field = Field(exact(), description=description)
    return Annotated[by_type, BeforeValidator(_type_alone)], field


if TYPE_CHECKING:

    class EngineSettings(_Mirror):
        main_grad_device: Literal["auto", "device", "host"] = "auto"

        def made(self) -> Config: ...

else:
    _Fields = _mirror(
        "EngineSettings",
        Config,
        main_grad_device=(
            Literal["auto", "device", "host"],
            Field(
                "auto",
                description="`device`, or `host`: sums of decoder layers stay in host memory, and "
                "come to the device for their layer's backward. `auto`: `host` on a GPU where the "
                "run fits so and not otherwise. Changes no bit.",
            ),
        ),
        attention=_one_of(
            DenseSettings,
            TopKSettings,
            description="`dense` (exact), or `topk` with the fields below.",
        ),
        backward=_one_of(
            AllSettings,
            SampledSettings,
            TruncatedSettings,
            description="`all` (exact), or `sampled` or `truncated` with the fields below.",
        ),
    )

    class EngineSettings(_Fields):
        def made(self) -> Config:
            """The engine's settings; ``auto``, until the plan has decided, is the device."""
            decided = self.main_grad_device if self.main_grad_device != "auto" else "device"
            return _Fields.made(self.model_copy(update={"main_grad_device": decided}))
