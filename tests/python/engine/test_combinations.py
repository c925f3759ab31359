"""Everything at once: random models, inputs, rules and tiers beside ordinary attention in fp64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import oomb

from .dense_mask import Visible, dense_attention
from .models import make
from .reference import (
    EXACT,
    Result,
    assert_equal,
    assert_identical,
    ordinary,
    random_ids,
    relative_error,
)
from .tiers import smallest_slots, wanted_slots, with_slots


def documents_of(choose: random.Random, batch: int, tokens: int) -> torch.Tensor:
    """[batch, tokens] document ids of random lengths."""
    rows = []
    for _ in range(batch):
        borders = sorted(choose.sample(range(1, tokens), choose.randint(0, min(4, tokens - 1))))
        row = torch.zeros(tokens, dtype=torch.int64)
        for border in borders:
            row[border:] += 1
        rows.append(row)
    return torch.stack(rows)


def rule_of(choose: random.Random) -> oomb.TopKPages:
    budget = choose.randint(1, 6)
    sink = choose.randint(0, budget)
    return oomb.TopKPages(
        budget=budget,
        share=choose.choice(["all_heads", "kv_head"]),  # type: ignore[arg-type]
        score=choose.choice(["block_mean", "token_softmax"]),  # type: ignore[arg-type]
        summary=choose.choice(["mean", "bounds"]),  # type: ignore[arg-type]
        sink_pages=sink,
        recent_pages=choose.randint(0, budget - sink),
        chunk_budget=choose.choice([None, budget, budget + 3]),
    )


def check(seed: int) -> None:
    choose = random.Random(seed)
    page = choose.choice([1, 2, 4, 5, 8, 16])
    chunk = page * choose.randint(1, 5)
    tokens, batch = choose.randint(3, 90), choose.randint(1, 3)
    model = make(
        choose.choice(["llama", "qwen2-tied", "qwen3", "mistral", "gpt-oss", "cohere", "granite"]),
        num_hidden_layers=choose.randint(1, 3),
        **({} if choose.random() < 0.5 else {"num_attention_heads": 4, "num_key_value_heads": 4}),
    )
    ids = random_ids(batch, tokens, seed)
    labels = ids.clone()
    generator = torch.Generator().manual_seed(seed)
    labels[torch.rand(labels.shape, generator=generator) < choose.choice([0, 0.3, 0.95])] = -100

    arguments: dict[str, torch.Tensor] = {}
    lengths = document_start = starts = None
    positions = torch.arange(tokens)[None].expand(batch, -1)
    if choose.random() < 0.4:
        lengths = torch.tensor([choose.randint(1, tokens) for _ in range(batch)])
        mask = torch.arange(tokens)[None] < lengths[:, None]
        labels[~mask] = -100
        arguments["attention_mask"] = mask.long()
    if choose.random() < 0.4:
        documents = documents_of(choose, batch, tokens)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        document_start = torch.where(starts, torch.arange(tokens), 0).cummax(dim=1).values
        positions = positions - document_start
        arguments["document_ids"] = documents
    labels[0, 2] = ids[0, 2]  # something to predict,
    if starts is not None and bool(starts[0, 2]):
        return
    if lengths is not None:
        lengths[0] = max(int(lengths[0]), 3)
        arguments["attention_mask"][0, :3] = 1
    weights = None
    if choose.random() < 0.3:
        weights = torch.rand(batch, tokens, generator=generator)
        arguments["loss_weights"] = weights

    settings: dict[str, Any] = {
        "chunk_size": chunk,
        "page_size": page,
        "recompute": choose.choice(["none", "layer", "auto"]),
        "keep_outputs": choose.choice(["none", "all", "auto", choose.random()]),
        "record_selection": True,
    }
    if choose.random() < 0.6:
        settings["attention"] = rule_of(choose)
    slots = None
    if (
        choose.random() < 0.6
        and tokens > 2 * chunk
        and not bool((labels[:, chunk + 1 :] == -100).all())
    ):
        smallest = smallest_slots(batch, 1)
        wanted = wanted_slots(model, settings, ids, labels, smallest, **arguments)
        slots = choose.randint(smallest, max(smallest, wanted))

    result = with_slots(model, settings, slots, ids, labels, **arguments)
    assert result.step is not None
    if slots is not None:
        in_one_tier = settings | {"keep_outputs": "none"}
        assert_identical(result, with_slots(model, in_one_tier, None, ids, labels, **arguments))
    visible = Visible(batch, tokens, chunk, page, result.step.selection, lengths, document_start)
    with dense_attention(model, visible):
        expected = ordinary(
            model, ids, labels, starts=starts, position_ids=positions, loss_weights=weights
        )
    without_vanishing(result, expected)
    # Gradients that nearly cancel, as those of keys with two tokens to see, lose a digit.
    assert_equal(result, expected, 10 * EXACT)
    with oomb.Engine(model, oomb.Config(**settings)) as engine:
        assert (
            relative_error(engine.evaluate(ids, labels, **arguments).loss, expected.loss) <= EXACT
        )


def without_vanishing(result: Result, expected: Result) -> None:
    """Take out gradients that are zero but for rounding, as those of keys where every query sees
    one token alone; they must be zero in both."""
    whole = sum(float(gradient.norm()) for gradient in expected.gradients.values())
    for name, gradient in list(expected.gradients.items()):
        if gradient.norm() <= EXACT * whole:
            assert result.gradients[name].norm() <= EXACT * whole, name
            del result.gradients[name], expected.gradients[name]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(20)
def test_random_combination(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("begin", range(40, 540, 100))
def test_500_random_combinations(begin: int) -> None:
    for seed in range(begin, begin + 100):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
