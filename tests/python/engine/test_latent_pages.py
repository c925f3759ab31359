"""Pages of latents are small, have the same bits wherever they are, and round as others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from oomb.engine import tracers
from oomb.plan.machine import Machine
from oomb.plan.planner import Planner

from .latent_models import (
    IDS,
    adapted,
    config,
    keys_and_values,
    make_latent,
    spilled,
    widths,
    with_both,
)
from .reference import (
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
    worst_error,
)

# Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "recompute"),
    [
        ("small", torch.float32, "none"),
        ("minicpm3", torch.float64, "layer"),
        ("minicpm3", torch.float32, "none"),
        ("minicpm3", torch.bfloat16, "layer"),
    ],
    ids=str,
)
def test_tiers_change_no_bit(name: str, dtype: torch.dtype, recompute: str) -> None:
    model, kept = make_latent(name, dtype), {"keep_outputs": "none", "recompute": recompute}
    whole = chunked(model, config(**kept), IDS, IDS)
    for slots in (6, 16):
        tight = chunked(model, spilled(model, slots, **kept), IDS, IDS)
        assert tight.step is not None
        assert tight.step.stats.h2d_bytes > 0
        assert_identical(tight, whole)


def test_pages_take_what_latents_take() -> None:
    """Stats, the engine's plan and the plan of a machine, against keys and values."""
    model, ids = make_latent("glm-4.7-flash", torch.float32), random_ids(1, 65)
    settings, layers = config(keep_outputs="none"), 2
    numbers = 48 * 192 * layers  # of filled tokens
    pages, step = 2 * 4 * numbers, 2**16  # with gradients; a pool grows in such steps
    found = chunked(model, settings, ids, ids)
    assert found.step is not None
    assert pages <= found.step.stats.device_peak_bytes <= -(-pages // step) * step
    predicted = Planner(model, Machine.here("cpu")).predict(65, settings, timed=False)
    assert predicted.device_pool_bytes == found.step.stats.device_peak_bytes
    with keys_and_values(), oomb.Engine(model, settings) as engine:
        assert engine.forward_backward(ids, ids).stats.device_peak_bytes > 4 * pages
    with oomb.Engine(model, settings) as engine:
        assert engine._calls.layout(settings).slot_bytes == 8 * 192 * 4


def test_latents_that_no_operation_takes() -> None:
    """Half of one is a head: of at most 512 numbers."""
    heads = {"num_attention_heads": 48, "num_key_value_heads": 48}
    for rank, width in ((1016, 1024), (1018, 0)):
        model = make_latent("small", kv_lora_rank=rank, qk_rope_head_dim=8, **heads)
        assert set(widths(model)) == {width}


def test_scratch_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has room for K and V of the tokens that are expanded at once, and their gradients."""
    model, taken = make_latent("minicpm3", torch.float32), []
    for tokens in (2**16, 2**17):
        monkeypatch.setattr("oomb.trace.stand_ins.SCRATCH_TOKENS", tokens)
        with oomb.Engine(model, config(keep_outputs="none")) as engine:
            taken.append(engine.plan(65).device_bytes)
        tracers.forget()
    assert taken[1] - taken[0] == 2**16 * 4 * 12 * 2 * (4 + 4)  # heads, head dim, K and V


# Rounding -------------------------------------------------------------------------------------


def test_gradient_pages_in_bfloat16() -> None:
    """Off by their rounding, by other noise in each call, and by none where the call is alike."""
    model = make_latent("small", torch.bfloat16)
    settings = config(kv_grad_dtype="bfloat16", keep_main_grad=True)
    exact = chunked(model, config(), IDS, IDS)
    with oomb.Engine(model, settings) as engine:
        assert engine._calls.layout(settings).grad_dtype == torch.bfloat16
        runs = []
        for _ in range(2):
            engine.forward_backward(IDS, IDS)
            runs.append(take_gradients(model))
    again = chunked(model, settings, IDS, IDS)
    assert all(torch.equal(again.gradients[name], runs[0][name]) for name in runs[0])
    assert any(not torch.equal(runs[1][name], runs[0][name]) for name in runs[0])
    errors = [relative_error(runs[0][name], exact.gradients[name]) for name in runs[0]]
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize("grads", ["float32", "bfloat16"])
def test_bfloat16_comes_as_near_as_keys_and_values_do(grads: str) -> None:
    model = make_latent("minicpm3", torch.bfloat16)
    ours, theirs = with_both(model, config(kv_grad_dtype=grads))
    exact = ordinary(model.double(), IDS, IDS)
    model.to(torch.bfloat16)
    assert worst_error(ours, exact)[0] <= 1.5 * worst_error(theirs, exact)[0]


def test_autocast() -> None:
    """Weights in fp32, products in bf16: as near to fp32 as one ordinary backward is."""
    model = make_latent("minicpm3", torch.float32)
    exact = ordinary(model, IDS, IDS)
    with torch.autocast("cpu", torch.bfloat16):
        stock = worst_error(ordinary(model, IDS, IDS), exact)[0]
        for recompute in ("none", "layer"):
            found = chunked(model, config(recompute=recompute), IDS, IDS)
            assert 1e-4 < worst_error(found, exact)[0] <= 1.5 * stock


@pytest.mark.parametrize(
    "where", [{"main_grad_device": "host"}, {"main_grad_dtype": "bfloat16"}], ids=str
)
def test_gradient_sums_elsewhere(where: dict[str, Any]) -> None:
    """On the host they have the same bits; in bf16 they come near."""
    model = make_latent("minicpm3", torch.bfloat16)
    here = chunked(model, config(), IDS, IDS)
    there = chunked(model, config(**where), IDS, IDS)
    if "main_grad_device" in where:
        assert_identical(there, here)
    else:
        assert 0 < worst_error(there, here)[0] < 0.05


def test_weights_on_the_host() -> None:
    expected = chunked(adapted(make_latent("small")), config(), IDS, IDS)
    model = adapted(make_latent("small"))
    assert_identical(chunked(model, config(weights="host"), IDS, IDS), expected)
