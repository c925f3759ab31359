"""Text to tokens, in several processes, cached on disk; memory does not grow with the text."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from oomb.train.documents import segments
from oomb.train.generated import reason_of
from oomb.train.rows import RowRule
from oomb.train.sources import Source

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Encoding, Tokenizer

_BATCH = 4  # segments that are tokenised at once
_WRITE = 16  # segments held before they are written


@dataclass(frozen=True)
class Rule:
    """All that tokens depend on besides the rows; the cache's key.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer`` as JSON, as :func:`with_every_character` gives it.
        before: ids that begin a document.
        after: ids that end one.
        rows: how a row of a table becomes a document.
        version: of the code here.
    """

    tokenizer: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    rows: RowRule = field(default_factory=RowRule)
    version: int = 2


def tokenise(
    sources: list[Source], rule: Rule, *, num_proc: int | None, cache_dir: str | None
) -> Dataset:
    """Dataset of ``document`` (int64), ``input_ids`` (list of int32) and ``counted`` (list of bool:
    which tokens are predicted; null: all of them), a row per segment; empty where no text is.

    Raises:
        BadInput: see :func:`oomb.train.documents.segments`.
    """
    import datasets  # heavy, and optional

    processes = num_proc or min(16, len(os.sched_getaffinity(0)))
    text = datasets.Features(
        document=datasets.Value("int64"),
        text=datasets.Value("large_string"),
        start=datasets.Value("int32"),
        end=datasets.Value("int32"),
        last=datasets.Value("bool"),
        spans=datasets.List(datasets.List(datasets.Value("int32"))),
        complete=datasets.Value("bool"),
        input_ids=datasets.List(datasets.Value("int32")),
        counted=datasets.List(datasets.Value("bool")),
    )
    tokens = {name: text[name] for name in ("document", "input_ids", "counted")}
    numbered = list(enumerate(sources))
    if next(segments(numbered, rule.rows), None) is None:  # of which datasets makes no table
        nothing: dict[str, list[Any]] = {name: [] for name in tokens}
        return datasets.Dataset.from_dict(nothing, features=datasets.Features(tokens))
    try:
        split = datasets.Dataset.from_generator(
            segments,
            features=text,
            cache_dir=cache_dir,
            gen_kwargs={"sources": numbered, "rule": rule.rows},
            num_proc=_processes(processes, len(sources)),
            writer_batch_size=_WRITE,
        )
        return split.map(
            tokens_of,
            batched=True,
            batch_size=_BATCH,
            writer_batch_size=_WRITE,
            fn_kwargs={"rule": rule},
            remove_columns=[name for name in text if name not in tokens],
            features=datasets.Features(tokens),
            num_proc=_processes(processes, -(-len(split) // _BATCH)),
            desc="Tokenising",
        )
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        reason = reason_of(error, cache_dir)
        if reason is not None:
            raise reason from None
        # Between processes an exception loses its kind: the file is found by reading again.
        for _ in segments(numbered, rule.rows):
            pass
        raise


def _processes(wanted: int, units: int) -> int | None:
    """None, for no process but this one, where several would have nothing to share."""
    number = min(wanted, units)
    return number if number > 1 else None


def tokens_of(batch: dict[str, list[Any]], rule: Rule) -> dict[str, list[Any]]:
    """Tokens of segments: from the one at ``start`` to the one before that at ``end``.

    A segment's neighbour sees the same characters around their common border and draws the same
    line there, so that every token of the document is taken once.
    """
    tokenizer = _tokenizer(rule.tokenizer)
    ids: list[list[int]] = []
    counted: list[Any] = []
    for number, text in enumerate(batch["text"]):
        if batch["input_ids"][number]:
            ids.append(batch["input_ids"][number])
            counted.append(batch["counted"][number])
            continue
        start, end, length = batch["start"][number], batch["end"][number], len(text)
        # One text at a time: the threads of encode_batch would compete with the other processes.
        encoding = tokenizer.encode(text, add_special_tokens=False)
        # At a document's ends nothing is left out, not even tokens that stand for no character.
        first = 0 if start == 0 else _first_token(encoding, start, length)
        behind = len(encoding.ids) if end == length else _first_token(encoding, end, length)
        begins = start == 0 and not batch["complete"][number]
        ends = batch["last"][number] and not batch["complete"][number]
        before, after = rule.before if begins else (), rule.after if ends else ()
        ids.append([*before, *encoding.ids[first:behind], *after])
        spans = batch["spans"][number]
        if spans is None:
            counted.append(None)
            continue
        marks = inside(encoding.offsets[first:behind], spans)
        # The end token belongs to what stands last; begin tokens are no one's.
        counted.append([False] * len(before) + marks + [bool(spans)] * len(after))
    return {"document": batch["document"], "input_ids": ids, "counted": counted}


def inside(offsets: list[tuple[int, int]], spans: list[list[int]]) -> list[bool]:
    """Which tokens have a character in one of the spans."""
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        inside |= (begins < end) & (ends > begin) & (begins < ends)
    found: list[bool] = inside.tolist()
    return found


def with_every_character(tokenizer: str) -> str:
    """A tokenizer's JSON, such that offsets of its tokens leave no character out.

    Those that trim offsets give a token of spaces none, and a word without the space before it.
    """
    settings = json.loads(tokenizer)
    if not _trims(settings.get("post_processor")):
        return tokenizer
    return json.dumps(settings, ensure_ascii=False)


def _trims(processor: dict[str, Any] | None) -> bool:
    """Whether a post-processor trimmed offsets; it no longer does."""
    if processor is None:
        return False
    inner = [_trims(one) for one in processor.get("processors", ())]
    trimmed = bool(processor.get("trim_offsets"))
    if trimmed:
        processor["trim_offsets"] = False
    return trimmed or any(inner)


def _first_token(encoding: Encoding, char: int, length: int) -> int:
    """Index of the first token at a character, or behind it where it has none."""
    for place in range(char, length):
        index = encoding.char_to_token(place)
        if index is not None:
            return index
    return len(encoding.ids)


@functools.lru_cache(maxsize=1)
def _tokenizer(text: str) -> Tokenizer:
    from tokenizers import Tokenizer  # heavy

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
