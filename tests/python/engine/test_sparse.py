"""Page-sparse attention equals dense attention under the mask of the pages it chose."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from oomb.ops.pages import page_select

from . import naive_selection
from .dense_mask import Visible, dense_attention
from .models import make
from .reference import Result, assert_equal, assert_identical, chunked, ordinary, random_ids

CHUNK, PAGE, TOKENS = 16, 4, 75
LENGTHS = torch.tensor([75, 49, 22])
DOCUMENTS = torch.tensor([0] * 13 + [1] * 20 + [2] * 42)[None].expand(3, -1)


def config(rule: oomb.Dense | oomb.PageRule, **settings: Any) -> oomb.Config:
    return oomb.Config(
        chunk_size=CHUNK, page_size=PAGE, attention=rule, record_selection=True, **settings
    )


def starts_of(documents: torch.Tensor) -> torch.Tensor:
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def run(
    name: str | PreTrainedModel,
    rule: oomb.Dense | oomb.PageRule,
    inputs: str = "plain",
    **settings: Any,
) -> tuple[Result, Result, Visible]:
    """Sparse training and ordinary training under the dense mask of what it chose."""
    model = make(name) if isinstance(name, str) else name
    batch = 1 if inputs == "plain" else 3
    ids = random_ids(batch, TOKENS)
    labels, lengths, document_start, starts = ids.clone(), None, None, None
    arguments: dict[str, torch.Tensor] = {}
    positions = torch.arange(TOKENS)[None].expand(batch, -1)
    if inputs == "padded":
        lengths = LENGTHS
        mask = torch.arange(TOKENS)[None] < lengths[:, None]
        labels[~mask] = -100
        arguments = {"attention_mask": mask.long()}
    if inputs == "documents":
        arguments = {"document_ids": DOCUMENTS}
        starts = starts_of(DOCUMENTS)
        document_start = torch.where(starts, torch.arange(TOKENS), 0).cummax(dim=1).values
        positions = torch.arange(TOKENS)[None] - document_start
    result = chunked(model, config(rule, **settings), ids, labels, **arguments)
    assert result.step is not None
    visible = Visible(batch, TOKENS, CHUNK, PAGE, result.step.selection, lengths, document_start)
    if isinstance(settings.get("backward"), oomb.TruncatedChunks):
        visible.window = settings["backward"].window
    with dense_attention(model, visible):
        expected = ordinary(model, ids, labels, starts=starts, position_ids=positions)
    return result, expected, visible


RULES = {
    "block mean": oomb.TopKPages(budget=3),
    "block mean per head": oomb.TopKPages(budget=3, share="kv_head"),
    "token softmax": oomb.TopKPages(budget=3, score="token_softmax"),
    "token softmax per head": oomb.TopKPages(budget=2, score="token_softmax", share="kv_head"),
    "bounds": oomb.TopKPages(budget=3, summary="bounds", share="kv_head"),
    "bounds, token softmax": oomb.TopKPages(budget=3, summary="bounds", score="token_softmax"),
    "one page": oomb.TopKPages(budget=1),
    "sink and recent": oomb.TopKPages(budget=4, sink_pages=1, recent_pages=2),
    "forced pages alone": oomb.TopKPages(budget=3, sink_pages=2, recent_pages=1, share="kv_head"),
    "chunk budget": oomb.TopKPages(budget=3, chunk_budget=5, share="kv_head"),
    "chunk budget, forced": oomb.TopKPages(budget=3, chunk_budget=4, sink_pages=1, recent_pages=1),
}


@pytest.mark.parametrize("inputs", ["plain", "padded", "documents"])
@pytest.mark.parametrize("rule", RULES)
def test_equals_dense_attention_under_the_selected_mask(rule: str, inputs: str) -> None:
    result, expected, visible = run("llama", RULES[rule], inputs)
    assert any(lists is not None for layer in visible.selection for lists in layer)
    assert_equal(result, expected)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "mistral", "phi3", "gpt-oss", "gemma2"])
def test_architectures(name: str, recompute: str) -> None:
    """Sliding-window layers ignore the rule."""
    result, expected, visible = run(name, RULES["block mean"], recompute=recompute)
    sliding_layers = {"mistral": {0, 1, 2}, "gpt-oss": {0, 2}, "gemma2": {0, 2}}.get(name, set())
    for layer, per_chunk in enumerate(visible.selection):
        sliding = layer in sliding_layers
        assert all(lists is None for lists in per_chunk) == sliding
    assert_equal(result, expected)


@pytest.mark.parametrize("inputs", ["plain", "padded", "documents"])
@pytest.mark.parametrize("rule", RULES)
def test_selection(rule: str, inputs: str) -> None:
    """Every list equals a choice by naive scores of the keys and queries that the model has."""
    given = RULES[rule]
    _, _, visible = run("llama", given, inputs)
    compared = 0
    for layer, per_chunk in enumerate(visible.selection):
        q, k = visible.seen[layer]
        for chunk, lists in enumerate(per_chunk):
            pages = chunk * CHUNK // PAGE
            assert (lists is None) == (pages <= given.budget)
            if lists is None:
                continue
            scores = naive_selection.scores_of_chunk(given, visible, q, k, chunk)
            scores = naive_selection.keep_best_of_chunk(scores, given)
            assert lists.shape == (*scores.shape[:3], given.budget)
            if given.chunk_budget is not None:
                for sequence in lists:
                    assert len(set(sequence[sequence >= 0].tolist())) <= given.chunk_budget
            for index in itertools.product(*(range(n) for n in scores.shape[:3])):
                row = scores[index]
                if row.isnan().any():
                    continue
                wanted = naive_selection.select(
                    row.tolist(), given.budget, given.sink_pages, given.recent_pages
                )
                assert lists[index].tolist() == wanted, (layer, chunk, index)
                compared += 1
    assert compared > 20


def test_ties_go_to_the_lower_page() -> None:
    """Scores of few distinct values, so that most choices are among equals."""
    generator = torch.Generator().manual_seed(3)
    for budget, sink, recent in [(1, 0, 0), (5, 0, 0), (5, 2, 1), (9, 0, 3), (16, 0, 0)]:
        scores = torch.randint(0, 3, (2, 4, 3, 12), generator=generator).double()
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = -torch.inf
        lists = page_select(scores, budget, sink_pages=sink, recent_pages=recent)
        for index in itertools.product(*(range(n) for n in scores.shape[:3])):
            wanted = naive_selection.select(scores[index].tolist(), budget, sink, recent)
            assert lists[index].tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [16, 64])  # 4 chunks of past at most: 16 pages
def test_a_budget_for_all_pages_has_the_bits_of_dense(budget: int, dtype: torch.dtype) -> None:
    model = make("qwen2", dtype)
    ids = random_ids(2, TOKENS)
    dense = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
    expected = chunked(model, dense, ids, ids)
    assert_identical(chunked(model, config(oomb.TopKPages(budget=budget)), ids, ids), expected)


def test_selection_is_recorded_on_request_alone() -> None:
    model = make("llama")
    ids = random_ids(1, TOKENS)
    plain = oomb.Config(chunk_size=CHUNK, page_size=PAGE, attention=oomb.TopKPages(budget=2))
    result = chunked(model, plain, ids, ids)
    assert result.step is not None
    assert result.step.selection == []


class Sweeps(oomb.SampledChunks):
    """Chunks 1 and 3 of 5."""

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return [1, 3]


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize(
    ("backward", "swept"), [(oomb.AllChunks(), range(5)), (Sweeps(), [1, 3])], ids=["all", "some"]
)
def test_a_choice_is_made_once(
    backward: oomb.AllChunks | oomb.SampledChunks, swept: list[int], recompute: str, spills: bool
) -> None:
    """In the fill, also by the last layer of what will be swept; the sweep's first chunk in it."""
    model, ids = make("llama"), random_ids(1, TOKENS)
    chosen: list[tuple[int, int]] = []

    class Noted(oomb.TopKPages):
        def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
            chosen.append((past.layer, past.chunk))
            return super().choose(q, summaries, past)

    tiers = {"device_memory": 12 * 2 * 2 * PAGE * 8 * 8, "host_memory": "1MiB"} if spills else {}
    settings = config(Noted(budget=2), recompute=recompute, backward=backward, **tiers)
    with oomb.Engine(model, settings) as engine:
        step = engine.forward_backward(ids, ids)
    assert (step.stats.h2d_bytes > 0) == spills
    last, first = len(step.selection) - 1, swept[-1]
    filled = [(i, c) for c in range(1, first) for i in range(last + 1) if i < last or c in swept]
    assert sorted(chosen[: len(filled)]) == sorted(filled)
    assert chosen[len(filled) :] == [(layer, first) for layer in range(last + 1)]
    for layer, lists in enumerate(step.selection):
        assert [c for c, x in enumerate(lists) if x is not None] == [
            c for c in range(5) if (layer, c) in chosen
        ]


@pytest.mark.parametrize("summary", ["mean", "bounds"])
def test_evaluate_in_two_tiers(summary: Any) -> None:
    """Two chunks take turns, and the host has the lists of those two alone: to load their pages."""
    model = make("llama")
    ids = random_ids(2, 200)
    rule = oomb.TopKPages(budget=3, summary=summary)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE, "attention": rule}
    losses = []
    for tiers in ({}, {"device_memory": 30_000, "host_memory": "1MiB"}):
        for record in (True, False):
            config = oomb.Config(**settings, **tiers, record_selection=record)
            with oomb.Engine(model, config) as engine:
                step = engine.evaluate(ids, ids)
            assert (step.stats.h2d_bytes > 0) == bool(tiers)
            losses.append(step.loss)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
