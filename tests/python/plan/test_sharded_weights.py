"""What ranks that share weights take, in a plan: by hand, and as the engine counts it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import oomb
from engine.models import make
from engine.recurrent_models import make_recurrent
from oomb.plan import Machine, predict

RANKS = 2
GIB = 2**30


def predicted(weights: str, model: Any, **settings: Any) -> Any:
    machine = Machine.described(device_memory=GIB, host_memory=GIB).of_rank(RANKS, weights=weights)
    config = oomb.Config(chunk_size=16, page_size=8, recompute="none", **settings)
    return predict(model, 64, config, machine=machine, optimizer="adamw_torch_fused", timed=False)


@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
@pytest.mark.sampled(2)
def test_bytes_of_a_rank(policy: str) -> None:
    model = make("qwen2", torch.float32, num_hidden_layers=5)
    values = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    everything = sum(p.numel() for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    others = everything - sum(values)
    whole, found = predicted("replicated", model), predicted(policy, model)
    assert found.parameter_bytes == pytest.approx(buffers + 4 * everything / RANKS, abs=4)
    assert found.optimizer_bytes == pytest.approx(8 * everything / RANKS, rel=1e-3)
    sums = {"zero1": 4 * everything}.get(policy, 4 * (others + sum(values) / RANKS + 3 * values[0]))
    assert found.sum_bytes == pytest.approx(sums, abs=4)
    gathered = 4 * (3 * values[0] + others) if policy == "zero3" else 4 * everything
    assert found.gathered_bytes == gathered
    beside = whole.call_bytes - whole.sum_bytes
    assert found.call_bytes - found.sum_bytes - gathered == beside
    assert found.as_dict()["sharded_weights"] == policy


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_weights_that_layers_share_are_whole(policy: str) -> None:
    model = make_recurrent("zamba2", torch.float32)
    layers = model.model.layers
    uses = Counter(p for layer in layers for p in layer.parameters())
    shared = sum(p.numel() for p, count in uses.items() if count > 1)
    rest = sum(p.numel() for p in model.parameters()) - shared
    found = predicted(policy, model)
    buffers = sum(b.nbytes for b in model.buffers())
    assert shared > 0
    assert found.parameter_bytes == pytest.approx(buffers + 4 * (shared + rest / RANKS), abs=4)
    assert found.optimizer_bytes == pytest.approx(8 * (shared + rest / RANKS), rel=1e-2)
    assert found.gathered_bytes <= 4 * rest


@pytest.mark.parametrize("policy", ["zero2", "zero3"])
@pytest.mark.sampled(1)
def test_shards_of_sums_on_the_host(policy: str) -> None:
    """The device has the whole sums of a layer, and places for the shards of three."""
    model = make("qwen2", torch.float32, num_hidden_layers=7)
    on_device, on_host = (
        predicted(policy, model, main_grad_device=place) for place in ("device", "host")
    )
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters()) / RANKS
    padding = 256 * 12 * 7
    assert 7 * layer <= on_host.sum_host_bytes <= 7 * layer + padding
    assert on_device.sum_host_bytes == 0
    spared = on_device.sum_bytes - on_host.sum_bytes
    assert spared == pytest.approx((7 - 3) * layer, abs=padding)
    assert on_device.call_bytes - on_host.call_bytes == spared


def test_unknown_weights() -> None:
    with pytest.raises(ValueError, match=r"sharded_weights: expected one of zero1, .*got 'zero4'"):
        Machine.described(device_memory=GIB).of_rank(RANKS, weights="zero4")
