"""Text to tokens, in several processes, cached on disk; memory does not grow with the text."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oomb.train.documents import Source, segments
from oomb.train.errors import BadInput

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Encoding, Tokenizer

_BATCH = 4  # segments that are tokenised at once
_WRITE = 16  # segments held before they are written


@dataclass(frozen=True)
class Rule:
    """All that tokens depend on besides the text; the cache's key.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer`` as JSON.
        before: ids that begin a document.
        after: ids that end one.
        version: of the code here.
    """

    tokenizer: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    version: int = 1


def tokenise(
    sources: list[Source], rule: Rule, *, num_proc: int | None, cache_dir: str | None
) -> Dataset:
    """Dataset of ``document`` (int64) and ``input_ids`` (list of int32), a row per segment.

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
    )
    tokens = datasets.Features(
        document=datasets.Value("int64"), input_ids=datasets.List(datasets.Value("int32"))
    )
    try:
        split = datasets.Dataset.from_generator(
            segments,
            features=text,
            cache_dir=cache_dir,
            gen_kwargs={"sources": list(enumerate(sources))},
            num_proc=_processes(processes, len(sources)),
            writer_batch_size=_WRITE,
        )
        return split.map(
            tokens_of,
            batched=True,
            batch_size=_BATCH,
            writer_batch_size=_WRITE,
            fn_kwargs={"rule": rule},
            remove_columns=["text", "start", "end", "last"],
            features=tokens,
            num_proc=_processes(processes, -(-len(split) // _BATCH)),
            desc="Tokenising",
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, BadInput):
            raise cause from None
        raise
    except OSError as error:
        place = cache_dir or datasets.config.HF_DATASETS_CACHE
        raise BadInput(
            f"data.cache_dir: expected a folder that can take the tokens, got {place}: {error}"
        ) from error


def _processes(wanted: int, units: int) -> int | None:
    """None, for no process but this one, where several would have nothing to share."""
    number = min(wanted, units)
    return number if number > 1 else None


def tokens_of(batch: dict[str, list[Any]], rule: Rule) -> dict[str, list[Any]]:
    """Tokens of segments: from the one at ``start`` to the one before that at ``end``.

    A segment's neighbour sees the same characters around their common border and draws the same
    line there, so that every token of the document is taken once.
    """
    tokenizer, ids = _tokenizer(rule.tokenizer), []
    for number, text in enumerate(batch["text"]):
        start, end, length = batch["start"][number], batch["end"][number], len(text)
        # One text at a time: the threads of encode_batch would compete with the other processes.
        encoding = tokenizer.encode(text, add_special_tokens=False)
        # At a document's ends nothing is left out, not even tokens that stand for no character.
        first = 0 if start == 0 else _first_token(encoding, start, length)
        behind = len(encoding.ids) if end == length else _first_token(encoding, end, length)
        taken = encoding.ids[first:behind]
        before = rule.before if start == 0 else ()
        after = rule.after if batch["last"][number] else ()
        ids.append([*before, *taken, *after])
    return {"document": batch["document"], "input_ids": ids}


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
