"""The loss: weights, divisors, log-probabilities, evaluation, and slices of the head."""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar

import pytest
import torch
from torch.nn import functional as F

import oomb
from oomb.core import loss as loss_module

from .models import make
from .reference import (
    EXACT,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    shifted,
)
from .tiers import HOST, slot_bytes

CONFIG = oomb.Config(chunk_size=16, page_size=8)


@pytest.fixture
def ids() -> torch.Tensor:
    return random_ids(2, 75)


def test_loss_weights(ids: torch.Tensor) -> None:
    """A weight belongs to a label; a weight of zero still counts its token."""
    model = make("llama")
    weights = torch.rand(2, 75, dtype=torch.float64) * 3 - 1
    weights[0, 20:40] = 0
    expected = ordinary(model, ids, ids, loss_weights=weights)
    assert_equal(chunked(model, CONFIG, ids, ids, loss_weights=weights), expected)


@pytest.mark.parametrize("number", [10, 4096, torch.tensor(77)], ids=str)
def test_num_items_in_batch(ids: torch.Tensor, number: int | torch.Tensor) -> None:
    model = make("llama")
    expected = ordinary(model, ids, ids, num_items_in_batch=float(number))
    assert_equal(chunked(model, CONFIG, ids, ids, num_items_in_batch=number), expected)


def test_equals_the_loss_of_the_model_itself(ids: torch.Tensor) -> None:
    """Hugging Face's own loss rounds to fp32."""
    model = make("qwen2")
    labels = ids.clone()
    labels[1, :30] = -100
    own = float(model(input_ids=ids, labels=labels).loss.detach())
    result = chunked(model, CONFIG, ids, labels)
    assert abs(float(result.loss) - own) < 1e-6 * own
    own = float(model(input_ids=ids, labels=labels, num_items_in_batch=11).loss.detach())
    result = chunked(model, CONFIG, ids, labels, num_items_in_batch=11)
    assert abs(float(result.loss) - own) < 1e-6 * own


def test_num_valid_tokens(ids: torch.Tensor) -> None:
    labels = ids.clone()
    labels[0, 10:33] = -100
    step = chunked(make("llama"), CONFIG, ids, labels).step
    assert step is not None
    assert step.num_valid_tokens == int((labels[:, 1:] != -100).sum())


def test_the_result_is_detached_and_in_the_models_precision(ids: torch.Tensor) -> None:
    for dtype, wanted in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ]:
        loss = chunked(make("llama", dtype), CONFIG, ids, ids).loss
        assert loss.dtype == wanted
        assert loss.shape == ()
        assert not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_evaluate_has_the_loss_of_training(ids: torch.Tensor, dtype: torch.dtype) -> None:
    """Also under a sparse rule, where both choose the same pages."""
    model = make("llama", dtype)
    for attention in (oomb.Dense(), oomb.TopKPages(budget=2)):
        config = oomb.Config(chunk_size=16, page_size=8, attention=attention)
        with oomb.Engine(model, config) as engine:
            step = engine.evaluate(ids, ids)
            assert all(p.grad is None for p in model.parameters())
            trained = engine.forward_backward(ids, ids)
        model.zero_grad()
        # Chunks are summed in opposite orders.
        assert relative_error(step.loss, trained.loss) <= 1e-6
        if dtype == torch.float64:
            assert relative_error(step.loss, trained.loss) <= EXACT
        assert step.num_valid_tokens == trained.num_valid_tokens


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss", "cohere", "granite", "gemma2"])
def test_logprobs(ids: torch.Tensor, name: str) -> None:
    model = make(name)
    labels = ids.clone()
    labels[0, 14:40] = -100
    labels[1, 60:] = -100
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    terms = F.cross_entropy(
        logits.flatten(0, 1), shifted(labels).flatten(), ignore_index=-100, reduction="none"
    ).view(2, 75)
    expected = torch.zeros(2, 75, dtype=torch.float64)
    expected[:, 1:] = -terms[:, :-1]
    with oomb.Engine(model, CONFIG) as engine:
        step = engine.evaluate(ids, labels, return_logprobs=True)
        assert engine.evaluate(ids, labels).logprobs is None
    assert step.logprobs is not None
    assert relative_error(step.logprobs, expected) <= EXACT
    assert torch.equal(step.logprobs == 0, expected == 0)


@pytest.mark.parametrize("in_two_tiers", [False, True])
def test_logits(ids: torch.Tensor, in_two_tiers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every token, targets or not; loss, weights and log-probabilities are as without them."""
    monkeypatch.setattr(loss_module, "slice_rows", lambda *_: 14)  # no divisor of a chunk's 32
    model = make("granite")
    labels = ids.clone()
    labels[0, 50:] = -100
    labels[:, 10:30] = -100
    weights = torch.rand(2, 75, dtype=torch.float64)
    tiers = {"device_memory": 20_000, "host_memory": "1MiB"} if in_two_tiers else {}
    rule = oomb.TopKPages(budget=64)  # sees all pages; in two tiers chunks take turns
    config = oomb.Config(chunk_size=16, page_size=8, attention=rule, **tiers)
    seen: dict[int, torch.Tensor] = {}

    def on_logits(begin: int, logits: torch.Tensor) -> None:
        assert 0 < logits.shape[1] <= 7 and begin not in seen
        seen[begin] = logits

    with oomb.Engine(model, config) as engine:
        plain = engine.evaluate(ids, labels, loss_weights=weights, return_logprobs=True)
        step = engine.evaluate(
            ids, labels, loss_weights=weights, return_logprobs=True, on_logits=on_logits
        )
    assert (step.stats.host_peak_bytes > 0) == in_two_tiers
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert relative_error(torch.cat([seen[b] for b in sorted(seen)], dim=1), expected) <= EXACT
    assert relative_error(step.loss, plain.loss) <= EXACT
    assert step.logprobs is not None and plain.logprobs is not None
    assert relative_error(step.logprobs, plain.logprobs) <= EXACT


def test_logits_without_a_target(ids: torch.Tensor) -> None:
    """Of padding behind every sequence there are none."""
    model, seen = make("llama"), []
    mask = torch.ones_like(ids)
    mask[0, 40:], mask[1, 60:] = 0, 0
    with oomb.Engine(model, CONFIG) as engine:
        step = engine.evaluate(
            ids,
            torch.full_like(ids, -100),
            attention_mask=mask,
            on_logits=lambda _, logits: seen.append(logits),
        )
    logits = torch.cat(seen, dim=1)
    assert logits.shape[1] == 60 and float(step.loss) == 0.0 and step.num_valid_tokens == 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    for row, length in enumerate((40, 60)):
        assert relative_error(logits[row, :length], expected[row, :length]) <= EXACT


@pytest.mark.parametrize("name", ["llama-tied", "cohere"])
def test_logits_come_in_slices(
    ids: torch.Tensor, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's logits never exist together; slices of any size give the same."""
    model = make(name)
    expected = ordinary(model, ids, ids)
    rows: list[int] = []
    head = loss_module.F.cross_entropy

    def recorded(logits: torch.Tensor, *args: object, **keywords: object) -> torch.Tensor:
        rows.append(logits.shape[0])
        return head(logits, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(loss_module.F, "cross_entropy", recorded)
    monkeypatch.setitem(loss_module._SLICE_BYTES, "cpu", 5 * 4 * model.config.vocab_size)
    assert_equal(chunked(model, CONFIG, ids, ids), expected)
    assert max(rows) <= 5
    assert sum(rows) == 148


CALLBACKS: ContextVar[int] = ContextVar("callbacks", default=0)


@pytest.mark.parametrize("taking_turns", [False, True])
def test_progress(ids: torch.Tensor, taking_turns: bool) -> None:
    """Fill: all chunks but the last, upwards. Sweep: all, downwards. In the caller's context."""
    model, config = make("llama"), CONFIG
    if taking_turns:
        tiers = {"device_memory": 24 * slot_bytes(model, config), "host_memory": HOST}
        config = dataclasses.replace(config, attention=oomb.TopKPages(budget=3), **tiers)
    seen: list[tuple[str, int]] = []
    tokens: list[int] = []

    def report(progress: oomb.Progress) -> None:
        CALLBACKS.set(CALLBACKS.get() + 1)
        seen.append((progress.phase, progress.chunk))
        tokens.append(progress.tokens_done)
        assert progress.num_chunks in (4, 5)
        assert progress.seconds >= 0

    before = CALLBACKS.get()
    chunked(model, config, ids, ids, on_progress=report)
    assert seen == [("fill", i) for i in range(4)] + [("sweep", i) for i in reversed(range(5))]
    assert tokens == [32, 64, 96, 128, 20, 52, 84, 116, 148]
    assert CALLBACKS.get() == before + 9


def test_labels_and_inputs_are_not_changed(ids: torch.Tensor) -> None:
    before, labels = ids.clone(), ids.clone()
    labels[0, :5] = -100
    kept = labels.clone()
    result = chunked(make("llama"), CONFIG, ids, labels)
    assert torch.equal(ids, before)
    assert torch.equal(labels, kept)
    assert_identical(chunked(make("llama"), CONFIG, ids, labels), result)
