"""Packed documents give what the same documents give one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb

from .models import make
from .reference import EXACT, Result, assert_equal, chunked, ordinary, random_ids, relative_error

CONFIG = oomb.Config(chunk_size=16, page_size=8)

# Lengths of the documents of one sequence, in chunks of 16 and pages of 8.
PACKINGS = {
    "across borders": (13, 30, 32),
    "on chunk borders": (16, 32, 16, 11),
    "on page borders": (8, 24, 40, 3),
    "one chunk holds three": (5, 4, 3, 60),
    "single tokens": (1, 20, 1, 1, 30),
    "one document": (75,),
}


def document_ids(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.full((n,), 3 * i) for i, n in enumerate(lengths)])[None]


def position_ids(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def one_by_one(model: Any, ids: torch.Tensor, lengths: tuple[int, ...]) -> Result:
    """Sum over separate calls, each weighted as its documents count in the packed one."""
    counted = sum(n - 1 for n in lengths)
    total: Result | None = None
    for part in ids.split(list(lengths), dim=1):
        if part.shape[1] == 1:
            continue
        one = ordinary(model, part, part, num_items_in_batch=counted)
        if total is None:
            total = one
        else:
            total.loss = total.loss + one.loss
            for name, gradient in one.gradients.items():
                total.gradients[name] = total.gradients[name] + gradient
    assert total is not None
    return total


@pytest.mark.parametrize("how", ["document_ids", "position_ids", "both"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss", "gemma2", "vaultgemma"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.sampled(30)
def test_equals_the_documents_one_by_one(packing: str, name: str, how: str) -> None:
    lengths = PACKINGS[packing]
    model = make(name)
    ids = random_ids(1, sum(lengths))
    given = {"document_ids": document_ids(lengths), "position_ids": position_ids(lengths)}
    if how != "both":
        given = {how: given[how]}
    result = chunked(model, CONFIG, ids, ids, **given)
    assert result.step is not None
    assert result.step.num_valid_tokens == sum(n - 1 for n in lengths)
    assert_equal(result, one_by_one(model, ids, lengths))


def test_equals_the_ordinary_call_with_these_positions() -> None:
    """Hugging Face reads restarting positions as documents, where there is no mask."""
    lengths = PACKINGS["across borders"]
    model = make("llama")
    ids, positions = random_ids(1, 75), position_ids(lengths)
    expected = ordinary(model, ids, ids, starts=positions == 0, position_ids=positions)
    assert_equal(chunked(model, CONFIG, ids, ids, position_ids=positions), expected)


def test_each_sequence_has_its_own_documents() -> None:
    """And a different sum of terms than a batch of separate calls would have: one mean over all."""
    packings = [PACKINGS["across borders"], (40, 35), (75,)]
    model = make("qwen2")
    ids = random_ids(3, 75)
    documents = torch.cat([document_ids(lengths) for lengths in packings])
    result = chunked(model, CONFIG, ids, ids, document_ids=documents)
    counted = [sum(n - 1 for n in lengths) for lengths in packings]
    parts = [
        one_by_one(model, row[None], lengths) for row, lengths in zip(ids, packings, strict=True)
    ]
    weights = [n / sum(counted) for n in counted]
    expected = Result(
        sum(w * part.loss for w, part in zip(weights, parts, strict=True)),  # type: ignore[arg-type]
        {
            name: sum(w * part.gradients[name] for w, part in zip(weights, parts, strict=True))  # type: ignore[misc]
            for name in parts[0].gradients
        },
    )
    assert_equal(result, expected)


def test_one_row_of_documents_serves_the_batch() -> None:
    lengths = PACKINGS["across borders"]
    model = make("llama")
    ids = random_ids(3, 75)
    one = chunked(model, CONFIG, ids, ids, document_ids=document_ids(lengths))
    each = chunked(model, CONFIG, ids, ids, document_ids=document_ids(lengths).expand(3, -1))
    assert_equal(one, each, 0.0)


def test_positions_without_restart_are_one_document() -> None:
    """Offset positions shift the angles, no more."""
    model = make("llama")
    ids = random_ids(1, 60)
    positions = torch.arange(60)[None] + 200
    expected = ordinary(model, ids, ids, position_ids=positions)
    assert_equal(chunked(model, CONFIG, ids, ids, position_ids=positions), expected)


def test_with_a_mask_positions_tell_no_documents() -> None:
    """As in an ordinary call: positions that restart beside a mask only change the angles."""
    model = make("llama")
    ids = random_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[1, 45:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    positions = position_ids((25, 35)).expand(2, -1)
    expected = ordinary(model, ids, labels, attention_mask=mask, position_ids=positions)
    result = chunked(model, CONFIG, ids, labels, attention_mask=mask, position_ids=positions)
    assert_equal(result, expected)


@pytest.mark.parametrize("chunk", [8, 24, 80])
def test_evaluate_of_documents(chunk: int) -> None:
    lengths = PACKINGS["across borders"]
    model = make("llama")
    ids = random_ids(1, 75)
    expected = one_by_one(model, ids, lengths)
    with oomb.Engine(model, oomb.Config(chunk_size=chunk, page_size=8)) as engine:
        step = engine.evaluate(ids, ids, document_ids=document_ids(lengths), return_logprobs=True)
    assert relative_error(step.loss, expected.loss) <= EXACT
    assert step.logprobs is not None
    firsts = torch.tensor([0, 13, 43])
    assert (step.logprobs[0, firsts] == 0).all()
    assert int((step.logprobs != 0).sum()) == step.num_valid_tokens
