"""Guessed page lists are as those that the synthetic selections draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oomb
from engine.models import make
from oomb.cli.bench_selection import SyntheticPages, UniformPages
from oomb.cli.bench_step import with_selection
from oomb.plan import UNIFORM, Choices, Machine, Planner

KINDS = [("synthetic", Choices()), ("uniform", UNIFORM)]


@pytest.mark.parametrize(("budget", "blocks", "past"), [(16, 8, 40), (16, 8, 160), (64, 32, 900)])
@pytest.mark.parametrize(("kind", "choices"), KINDS, ids=["synthetic", "uniform"])
@pytest.mark.parametrize("heads", [1, 3])
def test_distinct_pages(
    kind: str,
    choices: Choices,
    budget: int,
    blocks: int,
    past: int,
    heads: int,
) -> None:
    layers, rule = 40, oomb.TopKPages(budget=budget)
    drawing = SyntheticPages if kind == "synthetic" else UniformPages
    lists = drawing(budget=budget, layers=layers, blocks=blocks).drawn(
        past, heads, torch.device("cpu")
    )
    drawn = np.mean([np.unique(of_layer.numpy()).size for of_layer in lists])
    share = choices.share(rule, past, blocks, heads)
    assert share * past == pytest.approx(drawn, rel=0.03)
    random = np.random.default_rng(1)
    guesses = [choices.draw(random, rule, past, share, 1) for _ in range(layers)]
    assert np.mean([guess.size for guess in guesses]) == pytest.approx(drawn, rel=0.05)
    for guess in guesses:
        assert np.all(np.diff(guess) > 0) and guess[0] >= 0 and guess[-1] < past
        if choices.first:
            assert {*range(4), *range(past - 8, past)} <= set(guess.tolist())


def test_the_rules_own_bounds() -> None:
    """Sinks, latest pages and the budget of a chunk are the rule's."""
    rule = oomb.TopKPages(budget=16, sink_pages=1, recent_pages=2, chunk_budget=20)
    share = UNIFORM.share(rule, 200, 8, 1)
    assert share == pytest.approx(0.1)
    guess = UNIFORM.draw(np.random.default_rng(0), rule, 200, share, 1)
    assert {0, 198, 199} <= set(guess.tolist())
    small = oomb.TopKPages(budget=4)  # has no room for the pages that choices would force
    assert Choices().share(small, 100, 1, 1) == pytest.approx(0.04)


@pytest.mark.parametrize(("kind", "choices"), KINDS, ids=["synthetic", "uniform"])
def test_a_spilled_call(kind: str, choices: Choices) -> None:
    """Peak of the host tier and copies, as the page manager reports them for drawn lists."""
    rule = oomb.TopKPages(budget=24)
    config = oomb.Config(
        chunk_size=128, page_size=8, attention=rule, device_memory="1MiB", host_memory="1GiB"
    )
    model = make("llama", torch.float32, max_position_embeddings=8192)
    ids = torch.randint(97, (1, 6000))
    predicted = Planner(model, Machine.here("cpu")).predict(
        6000, config, optimizer=None, timed=False, choices=choices
    )
    with oomb.Engine(model, with_selection(config, kind, len(model.model.layers))) as engine:
        stats = engine.forward_backward(ids, ids).stats
    assert predicted.host_pool_bytes == pytest.approx(stats.host_peak_bytes, abs=2**20)
    for name in ("h2d_bytes", "d2h_bytes"):
        assert getattr(predicted, name) == pytest.approx(getattr(stats, name), rel=0.15), name
