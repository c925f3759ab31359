"""What a row of a table says: a text, a conversation, a prompt and its completion, or tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from oomb.nearest import nearest
from oomb.train.chat import (
    ChatTemplate,
    NotPreserved,
    Span,
    check_messages,
    check_tools,
    kind_of_value,
)
from oomb.train.errors import BadInput
from oomb.train.sources import Source

IGNORED = -100
_KINDS = ("tokens", "messages", "completion", "text")
_SETTINGS = {  # that name the columns of a kind
    "tokens": ("kind",),
    "messages": ("messages_field",),
    "completion": ("prompt_field", "completion_field"),
    "text": ("text_field",),
}

Reader = Callable[[Any], list[dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """A document: its text in blocks, or its tokens.

    Attributes:
        spans: characters whose tokens are predicted; None: all of them.
        complete: the text has its begin and end tokens.
        counted: which of ``input_ids`` are predicted; None: all of them.
    """

    blocks: Iterable[str] = ()
    spans: list[Span] | None = None
    complete: bool = False
    input_ids: list[int] = field(default_factory=list)
    counted: list[bool] | None = None


@dataclass(frozen=True)
class RowRule:
    """How a row becomes a document.

    Attributes:
        kind: ``text``, ``messages``, ``completion``, ``tokens``, or ``auto``: by its columns.
        chat: of conversations; None: there is no template.
        num_embeddings: ids of tokens are below it.
        version: of the code that reads rows, for the caches of what is made of them.
    """

    kind: str = "auto"
    text_field: str = "text"
    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    chat: ChatTemplate | None = None
    num_embeddings: int = 1 << 31
    version: int = 1

    def columns(self, kind: str) -> tuple[str, ...]:
        """Columns that a row of a kind must have."""
        return {
            "tokens": ("input_ids",),
            "messages": (self.messages_field,),
            "completion": (self.prompt_field, self.completion_field),
            "text": (self.text_field,),
        }[kind]

    def kind_of(self, values: dict[str, Any], source: Source) -> str:
        """The kind of a file's rows, from its first.

        Raises:
            BadInput: the columns fit several kinds, or not the one asked for.
        """
        fitting = [kind for kind in _KINDS if all(name in values for name in self.columns(kind))]
        if self.kind == "auto" and len(fitting) > 1:
            raise BadInput(
                f"data.kind: expected one of {', '.join(fitting)}, since {source.name} has the "
                "columns of each, got 'auto'"
            )
        kind = self.kind if self.kind != "auto" else (fitting or ["text"])[0]
        for setting, name in self._columns_by_setting(kind):
            if name not in values:
                known = [column for column in values if column is not None]
                near = nearest(name, known) or f" (columns: {', '.join(known)})"
                raise BadInput(
                    f"data.{setting}: expected a column of {source.name}, got {name!r}{near}"
                )
        return kind

    def _columns_by_setting(self, kind: str) -> list[tuple[str, str]]:
        return list(zip(_SETTINGS[kind], self.columns(kind), strict=True))

    def row(self, kind: str, values: dict[str, Any], number: int, source: Source) -> Row:
        """A row as a document.

        Raises:
            BadInput: it does not have what its kind needs.
        """
        place = f"row {number} of {source.name}"
        if kind == "tokens":
            return self._tokens(values, place)
        if kind == "text":
            return Row([_text(values, self.text_field, "text_field", place)])
        if kind == "completion" and not isinstance(values.get(self.prompt_field), list):
            kinds = "text or messages"
            prompt = _text(values, self.prompt_field, "prompt_field", place, kinds)
            completion = _text(values, self.completion_field, "completion_field", place)
            whole = prompt + completion
            return Row([whole], [(len(prompt), len(whole))])
        return self.conversation(kind, values, place)

    def conversation(
        self, kind: str, values: dict[str, Any], place: str, read: Reader = check_messages
    ) -> Row:
        """A row with messages as a document.

        Args:
            read: what makes messages of a column; it raises ValueError.

        Raises:
            BadInput: there is no chat template, or it does not take them.
        """
        turns = []
        for setting, name in self._columns_by_setting(kind):
            try:
                turns.append(read(values.get(name)))
            except ValueError as error:
                raise BadInput(f"data.{setting}: {error} in column {name!r} of {place}") from error
        setting = _SETTINGS[kind][0]
        if self.chat is None:
            raise BadInput(
                f"data.{setting}: expected a tokenizer with a chat template for {place}, got one "
                "without; data.chat_template names a file of Jinja"
            )
        try:
            tools = check_tools(values.get("tools"))
            if kind == "messages":
                text, spans = self.chat.conversation(turns[0], tools)
            else:
                text, spans = self.chat.answer(turns[0], turns[1], tools)
        except NotPreserved as error:
            raise BadInput(
                "data.chat_template: expected one that keeps earlier turns as they are, or marks "
                f"the assistant's with {{% generation %}}, got another: in {place} {error}; "
                "data.chat_template=trl takes TRL's for the model's family, where it has one"
            ) from error
        except Exception as error:  # whatever the template makes of the row
            reason = str(error).partition("\n")[0][:300] or type(error).__name__
            raise BadInput(
                f"data.{setting}: expected messages that the chat template takes, got {place}: "
                f"{reason}"
            ) from error
        return Row([text], spans, complete=True)

    def _tokens(self, values: dict[str, Any], place: str) -> Row:
        ids = values.get("input_ids")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise BadInput(f"data: expected a list of ints in column 'input_ids', got {place}")
        if ids and not 0 <= min(ids) <= max(ids) < self.num_embeddings:
            raise BadInput(
                f"data: expected ids below the model's {self.num_embeddings:,} embeddings in "
                f"column 'input_ids', got {min(ids):,} ... {max(ids):,} in {place}"
            )
        labels, mask = values.get("labels"), values.get("loss_mask")
        if labels is not None and mask is not None:
            raise BadInput(f"data: expected labels or loss_mask, got both in {place}")
        for name, column in (("labels", labels), ("loss_mask", mask)):
            if column is not None and (not isinstance(column, list) or len(column) != len(ids)):
                raise BadInput(
                    f"data: expected as many {name} as input_ids, {len(ids):,}, got others in "
                    f"{place}"
                )
        if mask is not None:
            if any(value not in (0, 1) for value in mask):
                raise BadInput(f"data: expected 0 and 1 in column 'loss_mask', got others, {place}")
            return Row(input_ids=ids, counted=[bool(value) for value in mask])
        if labels is None:
            return Row(input_ids=ids)
        pairs = zip(labels, ids, strict=True)
        if any(label not in (token, IGNORED) for label, token in pairs):
            raise BadInput(
                "data: expected labels that are each its own token or -100 (they are shifted when "
                f"the loss is taken), got others in {place}"
            )
        return Row(input_ids=ids, counted=[label != IGNORED for label in labels])


def _text(
    values: dict[str, Any], column: str, setting: str, place: str, kinds: str = "text"
) -> str:
    text = values.get(column)
    if isinstance(text, str):
        return text
    got = kind_of_value(text) if column in values else "no such column"
    raise BadInput(f"data.{setting}: expected {kinds} in column {column!r}, got {got} in {place}")
