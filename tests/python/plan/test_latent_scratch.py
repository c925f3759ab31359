"""What attention takes to expand a past of latents is counted where it does so, and as it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from engine.latent_models import adapted, make_latent
from oomb.core.latent_groups import Expanded
from oomb.errors import UnsupportedModelError
from oomb.plan import Machine, Planner
from oomb.trace.setting import Setting
from oomb.trace.trace import Tracer

from .allocations import peak_allocated

HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "groups of a GPU, batch, recompute": {"group": 8, "batch": 3, "recompute": "layer"},
    "bf16": {"model": "minicpm3", "dtype": torch.bfloat16},
    "adapters": {"lora": True, "group": 4},
    "two tiers": {"device_memory": "200KiB", "host_memory": "1GiB"},
    "page rule": {"attention": oomb.TopKPages(budget=128), "tokens": 2049},
    "one chunk": {"batch": 2, "tokens": 257, "group": 4},
    "two chunks": {"batch": 2, "tokens": 513, "group": 8},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(4)
def test_memory_of_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own allocations of one call, by a machine's plan and by the engine's."""
    settings = dict(CASES[name])
    batch, tokens = settings.pop("batch", 1), settings.pop("tokens", 1025)
    of_model = settings.pop("model", "small"), settings.pop("dtype", torch.float32)
    group, lora = settings.pop("group", 1), settings.pop("lora", False)
    monkeypatch.setattr("oomb.core.latent_groups.SCRATCH_TOKENS", 512)
    monkeypatch.setattr("oomb.core.page_demand.wave_pages", lambda *_, **__: group)
    own = {"chunk_size": 256, "page_size": 32, "recompute": "none", "keep_outputs": "none"}
    config = oomb.Config(**{**own, **settings})
    model: Any = make_latent(*of_model, max_position_embeddings=4096, **HEADS)
    if lora:
        model = adapted(model).float()
    ids, steps = torch.randint(97, (batch, tokens)), list[oomb.Step]()
    predicted = Planner(model, Machine.here("cpu")).predict(
        tokens, config, batch_size=batch, optimizer=None, timed=False
    )
    with oomb.Engine(model, config) as engine:
        planned = engine.plan(tokens, batch)
        measured = peak_allocated(lambda: steps.append(engine.forward_backward(ids, ids)))
    stats = steps[0].stats
    assert (stats.h2d_bytes > 0) == (name == "two tiers")
    made = predicted.call_bytes - batch * (tokens - 1) * 3 * 8  # ids, labels, mask are there
    made += predicted.list_bytes  # on a CPU in the same memory
    assert made == pytest.approx(measured, rel=0.02)
    pools = min(stats.device_peak_bytes, config.device_memory or stats.device_peak_bytes)
    assert planned.device_bytes == pytest.approx(measured + pools, rel=0.05)


def test_work_on_the_past_is_no_work_of_a_chunk() -> None:
    """It grows with the past, and is predicted apart."""
    tracer = Tracer(make_latent("small", torch.float32), "cpu", False)
    known = Expanded(heads=4, width=16, page_size=32, group=4, at_once=8)
    plain, ours = (tracer.trace(Setting(64, 1, "none", True, expanded=x)) for x in (None, known))
    assert ours.sweep_peak_bytes > plain.sweep_peak_bytes + known.scratch_bytes(1, 4)
    assert (ours.fill.flops, ours.sweep.flops) == (plain.fill.flops, plain.sweep.flops)


def test_a_call_without_a_trace_has_room_for_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the forward looks at values a rule of thumb knows of it too."""

    def refuse(*_: Any) -> None:
        raise UnsupportedModelError("its forward looks at values")

    monkeypatch.setattr(Tracer, "trace", refuse)
    config = oomb.Config(chunk_size=256, page_size=32, keep_outputs="none")
    with oomb.Engine(make_latent("small", torch.float32, **HEADS), config) as engine:
        planned = engine.plan(1025).device_bytes
        steps = list[oomb.Step]()
        ids = torch.randint(97, (1, 1025))
        measured = peak_allocated(lambda: steps.append(engine.forward_backward(ids, ids)))
    assert planned > 0.9 * (measured + steps[0].stats.device_peak_bytes)
