"""Calls that fill both tiers to the last page that a plan allows them."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest
import torch

import oomb

from .models import make
from .reference import Result, assert_identical, random_ids, take_gradients
from .tiers import slot_bytes

# Model, its layers, sequences, tokens, settings, and the share of the device tier that it would
# want which it gets.
CASES: dict[str, tuple[str, int, int, int, dict[str, Any], float]] = {
    "a layer": ("qwen2", 1, 1, 279, {}, 0.7),
    "a layer, sequences": ("qwen2", 1, 2, 261, {"keep_outputs": 0.5}, 0.5),
    "layers": ("qwen2", 2, 1, 335, {"chunk_size": 32}, 0.55),
    "hardly any host": ("qwen2", 3, 2, 209, {}, 0.9),
    "hardly any device": ("qwen2", 3, 1, 300, {}, 0.1),
    "kept outputs": ("qwen2", 3, 1, 400, {"keep_outputs": "all"}, 0.55),
    "windows": ("mistral", 2, 2, 230, {}, 0.6),
    "page lists": ("qwen2", 2, 2, 230, {"attention": oomb.TopKPages(budget=3)}, 0.5),
    "some chunks": ("llama", 2, 1, 330, {"backward": oomb.SampledChunks(keep=0.5, seed=1)}, 0.5),
    "gradients of few chunks": (
        "llama",
        2,
        1,
        330,
        {"backward": oomb.TruncatedChunks(window=2)},
        0.5,
    ),
}


def engine_of(name: str, slots: tuple[int, int] | None) -> tuple[oomb.Engine, torch.Tensor, int]:
    """With so many slots in the tiers, or all in one; the tokens; bytes of a slot."""
    kind, layers, batch, tokens, settings, _ = CASES[name]
    model = make(kind, num_hidden_layers=layers)
    settings = {"chunk_size": 16, "page_size": 8, "keep_outputs": "none", **settings}
    slot = slot_bytes(model, oomb.Config(**settings))
    if slots is not None:
        settings |= {"device_memory": slots[0] * slot, "host_memory": slots[1] * slot}
    return oomb.Engine(model, oomb.Config(**settings)), random_ids(batch, tokens), slot


def fits(name: str, device: int, host: int) -> bool:
    engine, ids, _ = engine_of(name, (device, host))
    with engine:
        return engine.plan(ids.shape[1], batch_size=ids.shape[0]).fits


def run(name: str, slots: tuple[int, int] | None, begun: list[Any]) -> tuple[Result, int]:
    engine, ids, slot = engine_of(name, slots)
    with engine:
        step = engine.forward_backward(ids, ids, on_progress=begun.append)
        return Result(step.loss, take_gradients(engine._model.causal), step), slot


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(6)
def test_what_fits_by_the_plan_runs(name: str) -> None:
    """With the smallest host tier that a plan allows; with one page less no chunk begins."""
    whole, slot = run(name, None, [])
    assert whole.step is not None
    wanted = whole.step.stats.device_peak_bytes // slot
    device = round(CASES[name][-1] * wanted)
    host = bisect_left(range(2 * wanted), True, key=lambda host: fits(name, device, max(1, host)))
    assert 1 < host < 2 * wanted
    found, _ = run(name, (device, host), [])
    assert_identical(found, whole)
    assert found.step is not None and found.step.stats.h2d_bytes > 0
    begun: list[Any] = []
    with pytest.raises(oomb.OutOfMemoryError):
        run(name, (device, host - 1), begun)
    assert not begun
