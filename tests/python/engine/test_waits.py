"""Where compute waits for pages: the access order, and sums over it in a step's stats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oomb
from oomb.core.layout import ACCUMULATE, READ_GRADIENT, Chunks, PagedLayers, call_order

from .models import make
from .reference import random_ids
from .tiers import with_slots

CHUNKS = Chunks(tokens=75, chunk_size=16, page_size=8)


@pytest.mark.parametrize("swept", [[0, 1, 2, 3, 4], [1, 3]])
def test_own_gradients_are_read_right_behind_what_is_added(swept: list[int]) -> None:
    """Of every swept chunk but the first, whose keys nobody asks a gradient of."""
    order = call_order(PagedLayers.alike(CHUNKS, [0, 0, 12]), swept[-1], swept, whole_fill=False)
    for chunk in range(CHUNKS.number):
        for layer in range(3):
            row = order.own_gradient[chunk, layer]
            if chunk not in swept[:-1]:
                assert row == -1
                continue
            assert row == order.accumulate[chunk, layer] + 1
            own = [CHUNKS.first_page(chunk), CHUNKS.first_page(chunk + 1)]
            assert order.visits[row].tolist() == [layer, READ_GRADIENT, *own]
            assert order.visits[row - 1][1] == ACCUMULATE


def test_every_visit_counts_in_one_pass() -> None:
    order = call_order(
        PagedLayers.alike(CHUNKS, [0, 0]), 4, [0, 2, 4], whole_fill=False, paired=True
    )
    per_visit = np.random.default_rng(0).random(len(order.visits))
    by_pass = order.by_pass(per_visit)
    assert sum(x.sum() for x in by_pass.values()) == pytest.approx(per_visit.sum())
    assert by_pass["fill"][1, 0] == per_visit[order.fill[1, 0]]
    assert by_pass["forward"][2, 1] == per_visit[order.read[2, 1]]
    own = order.own_gradient[2, 1]
    assert by_pass["backward"][2, 1] == per_visit[own - 1] + per_visit[own]
    assert not by_pass["backward"][1].any()  # a chunk that is not swept


def test_stats_say_where_compute_waited() -> None:
    model = make("llama", torch.float32, num_hidden_layers=2)
    ids = random_ids(1, 120)
    settings = {"chunk_size": 16, "page_size": 8}
    step = with_slots(model, settings, 5, ids, ids, {"copy_delay_seed": 1}).step
    assert isinstance(step, oomb.Step)
    stats = step.stats
    assert stats.exposed_copy_seconds > 0
    assert stats.exposed_growth_seconds > 0  # the host tier has its memory from this call
    for parts, entries in ((stats.exposed_by_chunk, 8), (stats.exposed_by_layer, 2)):
        assert set(parts) == {"fill", "forward", "backward"}
        assert all(len(part) == entries for part in parts.values())
        assert sum(map(sum, parts.values())) == pytest.approx(stats.exposed_copy_seconds)
        assert min(map(sum, parts.values())) > 0
