"""Examples of a task: prompts, answers and what is thought of them, as TRL's trainers take them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from oomb.nearest import nearest
from oomb.train.chat import check_messages
from oomb.train.errors import BadInput
from oomb.train.generated import features_of, generated
from oomb.train.settings import RunSettings
from oomb.train.sources import Source, rows
from oomb.train.tasks import Task, arguments_kind

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_FIRST_ROWS = 8
_ANSWERS = ("completion", "chosen", "rejected")
_TEXTS = ("prompt", "completion", "chosen", "rejected")
_BESIDE = ("tools", "chat_template_kwargs")
_SAMPLES = 256  # examples that stand for all


class Examples:
    """Examples of a run, and how long they are.

    Attributes:
        dataset: for TRL, which tokenises.
        lengths: tokens of each example's longest sequence.
        left_out: how many were longer than the context.
    """

    num_targets = None

    def __init__(self, dataset: Dataset, lengths: Sequence[int], left_out: int = 0) -> None:
        self.dataset, self.lengths, self.left_out = dataset, list(lengths), left_out

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def longest_document(self) -> int:
        return self.longest

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def identity(self) -> str:
        """Short text that other examples do not share, from a sample of them."""
        digest = hashlib.sha256(np.array(self.lengths, dtype=np.int64).tobytes())
        step = max(1, len(self) // _SAMPLES)
        for number in range(0, len(self), step):
            digest.update(json.dumps(self.dataset[number], sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def subset(self, indices: Sequence[int]) -> Examples:
        chosen = [self.lengths[index] for index in indices]
        return Examples(self.dataset.select(indices), chosen, self.left_out)


class ExampleRule:
    """How a row of a table becomes an example of a task."""

    def __init__(
        self, task: Task, settings: RunSettings, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.task, self._data, self._tokenizer = task, settings.data, tokenizer
        self._trl = settings.trl
        self.context = settings.context
        # Tokens that are generated behind each prompt at most.
        self._completion = 0
        if task.generates:
            declared = {field.name: field.default for field in fields(arguments_kind(task))}
            longest: Any = (declared | settings.trl)["max_completion_length"]
            self._completion = longest or 0

    def example(self, values: dict[str, Any], number: int, source: Source) -> dict[str, Any]:
        """A row with the columns that TRL knows.

        Raises:
            BadInput: a column is missing or holds something else.
        """
        place = f"row {number} of {source.name}"
        row = self._by_meaning(values, source)
        for name in self.task.needed:
            if name not in row:
                near = nearest(name, list(values)) or f" (columns: {', '.join(values)})"
                raise BadInput(f"data: expected a column {name!r} in {place}, got none{near}")
        texts = [name for name in _TEXTS if name in row and self._reads(name)]
        spoken = isinstance(row[texts[0]], list)
        for name in texts:
            self._check(row[name], spoken, name, place)
        if "label" in self.task.needed:
            if row["label"] not in (0, 1):
                raise BadInput(
                    f"data: expected true or false in column 'label', got {row['label']!r} in "
                    f"{place}"
                )
            row["label"] = bool(row["label"])
        if self.task.generates:  # reward functions are given every column
            return row
        kept = {*texts, "label"} & {*_TEXTS, *self.task.needed} | {*_BESIDE}
        return {name: value for name, value in row.items() if name in kept}

    def _by_meaning(self, values: dict[str, Any], source: Source) -> dict[str, Any]:
        """Columns by the names that TRL knows; one that settings name before one called so."""
        own = {}
        for field, meaning in (("prompt_field", "prompt"), ("completion_field", "completion")):
            name = getattr(self._data, field)
            if not self._reads(meaning):
                continue
            if name != meaning and name not in values:
                near = nearest(name, list(values)) or f" (columns: {', '.join(values)})"
                raise BadInput(
                    f"data.{field}: expected a column of {source.name}, got {name!r}{near}"
                )
            own[name] = meaning
        hidden = set(own.values()) - set(own)
        return {own.get(name, name): value for name, value in values.items() if name not in hidden}

    def _reads(self, name: str) -> bool:
        return name in self.task.needed or name == "prompt"

    def _check(self, value: Any, spoken: bool, name: str, place: str) -> None:
        if spoken:
            if self._tokenizer.chat_template is None:
                raise BadInput(
                    f"data: expected a tokenizer with a chat template for messages, got one "
                    f"without, {place}; data.chat_template names a file of Jinja"
                )
            try:
                check_messages(value)
            except ValueError as error:
                raise BadInput(f"data: column {name!r}: {error} in {place}") from error
            return
        if not isinstance(value, str):
            raise BadInput(
                f"data: expected text in column {name!r}, as in the columns beside it, got "
                f"{type(value).__name__} in {place}"
            )
        if self._tokenizer.eos_token is None and not self.task.generates:
            raise BadInput(
                "data: expected a tokenizer with an EOS token, with which an answer ends, or "
                f"messages, got text in {place}"
            )

    def tokens(self, row: dict[str, Any]) -> int:
        """Tokens of an example's longest sequence, with what is generated at most.

        Raises:
            BadInput: the chat template does not take its messages.
        """
        try:
            return self._longest(row) + self._completion
        except Exception as error:  # whatever the template makes of the row
            reason = str(error).partition("\n")[0][:300] or type(error).__name__
            raise BadInput(
                f"data: expected messages that the chat template takes, got others: {reason}"
            ) from error

    def _longest(self, row: dict[str, Any]) -> int:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        told = self._trl if self.task.generates else row  # where TRL looks
        of_template = told.get("chat_template_kwargs") or {}
        of_template = json.loads(of_template) if isinstance(of_template, str) else of_template
        answers = [row[name] for name in self.task.needed if name in _ANSWERS]
        prompt = row.get("prompt")
        longest = 0
        for answer in answers or [None]:
            parts = [part for part in (prompt, answer) if part is not None]
            if isinstance(parts[0], list):
                turns = [turn for part in parts for turn in part]
                ids: Any = self._tokenizer.apply_chat_template(
                    turns,
                    tools=tools or None,
                    tokenize=True,
                    return_dict=True,
                    add_generation_prompt=answer is None,
                    **of_template,
                )
                longest = max(longest, len(ids["input_ids"]))
            else:
                ids = self._tokenizer("".join(parts))["input_ids"]
                longest = max(longest, len(ids) + (answer is not None))
        return longest


def check_first_examples(sources: Sequence[Source], rule: ExampleRule) -> None:
    """Read what stands first in each file, and write it by the chat template.

    Raises:
        BadInput: as :func:`examples_of` would, later.
    """
    for source in sources:
        for number, values in enumerate(islice(_table(source), _FIRST_ROWS)):
            row = rule.example(values, number, source)
            rule.tokens(row)


def examples_of(
    field: str, sources: Sequence[Source], rule: ExampleRule, cache_dir: str | None
) -> Examples:
    """All examples of some files that are no longer than the context.

    Raises:
        BadInput: a row is not what it should be, or none is short enough.
    """
    arguments: dict[str, Any] = {"sources": list(sources), "rule": rule}
    features = None  # those of a table, which has the same in every row
    if any(source.format == "jsonl" for source in sources):
        features = features_of(field, _generate(**arguments))
    whole = generated(field, _generate, arguments, cache_dir, features)
    lengths = [rule.tokens(row) for row in whole]
    short = [number for number, tokens in enumerate(lengths) if tokens <= rule.context]
    if not short:
        least = min(lengths, default=0)
        raise BadInput(
            f"{field}: expected examples of at most {rule.context:,} tokens, the context, got none "
            f"of {len(lengths):,}; the shortest has {least:,}"
        )
    kept = whole if len(short) == len(lengths) else whole.select(short)
    return Examples(kept, [lengths[number] for number in short], len(lengths) - len(short))


def _generate(sources: list[Source], rule: ExampleRule) -> Iterator[dict[str, Any]]:
    first: tuple[bool, str] | None = None
    for source in sources:
        for number, values in enumerate(_table(source)):
            example = rule.example(values, number, source)
            place = f"row {number} of {source.name}"
            has_prompt = "prompt" in example
            first = first or (has_prompt, place)
            if has_prompt != first[0]:  # TRL goes by the first
                with_one, without = (place, first[1]) if has_prompt else (first[1], place)
                raise BadInput(
                    f"data: expected a prompt in every row or in none, got one in {with_one} and "
                    f"none in {without}"
                )
            yield example


def _table(source: Source) -> Iterator[dict[str, Any]]:
    if source.format == "text":
        raise BadInput(f"data: expected tables for a task of TRL, got the text {source.name}")
    return rows(source)
