"""Conversations as text, and which of its characters the assistant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oomb.train.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # first character, and the one behind the last


class NotPreserved(ValueError):
    """A template writes a turn otherwise once another follows it."""


@dataclass(frozen=True)
class ChatTemplate:
    """All that a conversation's text depends on besides its messages.

    Attributes:
        template: Jinja, as in a tokenizer.
        special_tokens: names and texts that it may use.
        marked: it says itself what the assistant wrote, with ``{% generation %}``.
    """

    template: str
    special_tokens: tuple[tuple[str, str], ...]
    marked: bool

    def text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text, and what its marks say is the assistant's; nothing without marks."""
        from transformers.utils.chat_template_utils import render_jinja_template  # heavy

        said = [{name: v for name, v in turn.items() if v is not None} for turn in messages]
        special: dict[str, Any] = dict(self.special_tokens)
        rendered: Any = render_jinja_template(
            conversations=[said],
            tools=tools,
            chat_template=self.template,
            return_assistant_tokens_mask=self.marked,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
        texts, spans = rendered
        return texts[0], [(begin, end) for begin, end in spans[0]] if spans else []

    def conversation(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """The text, and the characters of the assistant's turns.

        Without marks a turn is what it adds to the conversation before it and the template's
        invitation to answer; the text before must not change by it.

        Raises:
            NotPreserved: it does.
        """
        whole, spans = self.text(messages, tools)
        if self.marked:
            return whole, spans
        for number, turn in enumerate(messages):
            if turn["role"] == "assistant":
                spans.append(self._turn(whole, messages, number, tools))
        return whole, spans

    def answer(
        self,
        prompt: Sequence[dict[str, Any]],
        completion: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of both, and the characters of the completion.

        Raises:
            NotPreserved: the completion changes the text of the prompt.
        """
        whole, _ = self.text([*prompt, *completion], tools)
        before, _ = self.text(prompt, tools, add_generation_prompt=True)
        if not whole.startswith(before):
            raise NotPreserved("the prompt is written otherwise once its completion follows")
        return whole, [(len(before), len(whole))]

    def _turn(
        self,
        whole: str,
        messages: Sequence[dict[str, Any]],
        number: int,
        tools: list[Any] | None,
    ) -> Span:
        if number == 0:
            raise NotPreserved("the conversation begins with the assistant")
        before, _ = self.text(messages[:number], tools, add_generation_prompt=True)
        until, _ = self.text(messages[: number + 1], tools)
        if not (whole.startswith(until) and until.startswith(before)):
            raise NotPreserved(f"turn {number} is written otherwise once another follows it")
        return len(before), len(until)


def chat_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> ChatTemplate | None:
    """The template of a tokenizer, or another.

    Args:
        chosen: a file with a template, or ``trl`` for TRL's own of the tokenizer's family; None:
            the tokenizer's, and None where it has none.

    Raises:
        BadInput: the file cannot be read; TRL is missing or has none.
    """
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if chosen == "trl":
        template = _of_trl(tokenizer) or template
    elif chosen is not None:
        try:
            with open(chosen, encoding="utf-8") as stream:
                template = stream.read()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"data.chat_template: expected a file of Jinja, or trl, got {chosen}: {error}"
            ) from error
    if template is None:
        return None
    special = tokenizer.special_tokens_map.items()
    return ChatTemplate(
        template,
        tuple((name, str(text)) for name, text in special if not isinstance(text, list)),
        _GENERATION.search(template) is not None,
    )


def _of_trl(tokenizer: PreTrainedTokenizerBase) -> str | None:
    try:
        from trl.chat_template_utils import get_training_chat_template  # optional
    except ImportError as error:
        raise BadInput(
            "data.chat_template: expected trl to be installed; pip install 'oomb[trl]'"
        ) from error
    try:
        found: str | None = get_training_chat_template(tokenizer)
        return found
    except ValueError as error:
        reason = str(error).partition("\n")[0][:200]
        raise BadInput(
            f"data.chat_template: expected a template that TRL knows, got another: {reason}"
        ) from error


def check_messages(messages: Any, kinds: Sequence[str] = ("text",)) -> list[dict[str, Any]]:
    """The turns of a conversation.

    Args:
        kinds: types that parts of a message may have.

    Raises:
        ValueError: ``expected ..., got ...``.
    """
    if not isinstance(messages, list) or not messages:
        got = "an empty one" if messages == [] else kind_of_value(messages)
        raise ValueError(f"expected a list of messages, got {got}")
    for turn in messages:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            names = ", ".join(turn) if isinstance(turn, dict) else type(turn).__name__
            raise ValueError(f"expected messages with role and content, got {names}")
        content = turn.get("content")
        for part in content if isinstance(content, list) else []:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in kinds:
                known = kind == "image"
                raise ValueError(
                    f"expected messages of {' and '.join(kinds)}, got a part of type {kind!r}"
                    + ("; data.images=true reads it, for a model that sees" if known else "")
                )
    return messages


def kind_of_value(value: Any) -> str:
    """What a value of a row is called in a message."""
    return "null" if value is None else type(value).__name__


def check_tools(tools: Any) -> list[Any] | None:
    """Tools of a conversation; data sets keep them as JSON in text too.

    Raises:
        ValueError: ``expected ..., got ...``.
    """
    found = json.loads(tools) if isinstance(tools, str) and tools else tools
    if not found:
        return None
    if not isinstance(found, list):
        raise ValueError(f"expected a list of tools, got {type(found).__name__}")
    return found
