"""What an engine says of itself: state, snapshot, statistics and plan."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import oomb

from .models import make
from .reference import chunked, random_ids

IDS = random_ids(2, 75)


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(chunk_size=16, page_size=8, **settings)


def test_state_dict_goes_through_a_file() -> None:
    model = make("llama")
    rule = oomb.SampledChunks(keep=0.9, seed=7)
    with oomb.Engine(model, config(backward=rule)) as engine:
        engine.forward_backward(IDS, IDS)
        engine.forward_backward(IDS, IDS)
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
    file.seek(0)
    with oomb.Engine(model, config(backward=rule)) as engine:
        engine.load_state_dict(torch.load(file))
        assert engine.state_dict()["step"] == 2


def test_snapshot() -> None:
    with oomb.Engine(make("llama"), config()) as engine:
        assert engine.snapshot() == {}
        seen: list[dict[str, Any]] = []
        engine.forward_backward(IDS, IDS, on_progress=lambda _: seen.append(engine.snapshot()))
    assert len(seen) == 9
    assert all(isinstance(one, dict) and one for one in seen)


def test_stats() -> None:
    model = make("llama")
    step = chunked(model, config(), IDS, IDS).step
    assert step is not None
    stats = step.stats
    assert stats.fill_seconds > 0
    assert stats.sweep_seconds > 0
    pages = 2 * 4 * 2 * 3  # batch, chunks with a past to serve, pages per chunk, layers
    page_bytes = 2 * 2 * 8 * 8 * 8  # K and V, heads, tokens, head_dim, bytes
    assert stats.device_peak_bytes >= 2 * pages * page_bytes  # with their gradients
    assert stats.host_peak_bytes == stats.h2d_bytes == stats.d2h_bytes == 0
    assert stats.exposed_copy_seconds == stats.exposed_growth_seconds == 0
    assert stats.hit_rate == 1


def test_plan_says_where_ordinary_training_needs_less() -> None:
    """Many key/value heads make large pages; a short sequence is not worth the sums in fp32."""

    def says_so(num_tokens: int, **settings: int) -> bool:
        with oomb.Engine(make("llama", torch.bfloat16, **settings), config()) as engine:
            return any("ordinary training" in text for text in engine.plan(num_tokens).advice)

    assert says_so(5000, num_key_value_heads=6, num_attention_heads=6, head_dim=32)
    assert not says_so(5000, num_key_value_heads=1)
    assert says_so(50, num_key_value_heads=1)


def test_plan() -> None:
    model = make("llama")
    with oomb.Engine(model, config()) as engine:
        plan = engine.plan(75, batch_size=2)
        assert plan.fits
        assert plan.seconds is None
        assert engine.plan(5000, batch_size=2).advice == ()
        step = engine.forward_backward(IDS, IDS)
        measured = engine.plan(75, batch_size=2)
        assert measured.seconds == pytest.approx(step.stats.fill_seconds + step.stats.sweep_seconds)
        parameters = sum(p.numel() * 8 for p in model.parameters())
        assert plan.device_bytes >= parameters + 96 * 2048
        assert engine.plan(10**12).fits is False
        assert engine.plan(10**12).advice
    small = config(device_memory=4 * 2048, host_memory=8 * 2048)
    with oomb.Engine(model, small) as engine:
        plan = engine.plan(75, batch_size=2)
        assert not plan.fits
        assert any("host_memory" in text for text in plan.advice)
        with pytest.raises(oomb.OutOfMemoryError):
            engine.forward_backward(IDS, IDS)


def test_plan_says_what_a_call_takes() -> None:
    """Where plan says it fits just so, it does; a page less, and it does not."""
    model = make("llama")
    device = 8 * 2048
    with oomb.Engine(model, config(device_memory=device, host_memory=2048)) as engine:
        plan = engine.plan(75, batch_size=2)
    host = plan.host_bytes  # the least
    assert host > 0 and not plan.fits
    with oomb.Engine(model, config(device_memory=device, host_memory=host)) as engine:
        plan = engine.plan(75, batch_size=2)
        assert plan.fits and plan.host_bytes == host
        engine.forward_backward(IDS, IDS)
    with oomb.Engine(model, config(device_memory=device, host_memory=host - 2048)) as engine:
        assert not engine.plan(75, batch_size=2).fits
        with pytest.raises(oomb.OutOfMemoryError):
            engine.forward_backward(IDS, IDS)


@pytest.mark.parametrize("device_memory", ["64KiB", "600KiB"])
@pytest.mark.parametrize("tokens", [400, 2000])
def test_plan_counts_the_host_tier_as_it_grows(device_memory: str, tokens: int) -> None:
    """In steps; and where there is room for them, pages stay there when they are copied."""
    ids = random_ids(1, tokens)
    model = make("llama", max_position_embeddings=2048)
    settings = config(device_memory=device_memory, host_memory="1GiB", keep_outputs="none")
    with oomb.Engine(model, settings) as engine:
        planned = engine.plan(tokens).host_bytes
        assert engine.forward_backward(ids, ids).stats.host_peak_bytes == planned
