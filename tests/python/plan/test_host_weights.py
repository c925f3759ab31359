"""A plan of weights that the host keeps: bytes, the link's seconds, the chunk that hides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import oomb
from oomb.model.causal import CausalModel
from oomb.model.host_weights import HostWeights
from oomb.plan import Machine, Planner
from oomb.plan.choosing import candidates
from oomb.plan.prediction import Prediction
from oomb.plan.remedies import remedies

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
SHAPE = LlamaConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(SHAPE, Machine.described(gpu="rtx4090"), dtype=torch.bfloat16, adapter=LORA)


def predicted(planner: Planner, tokens: int = 4096, **settings: Any) -> Prediction:
    config = oomb.Config(recompute="layer", keep_outputs="none", **settings)
    return planner.predict(tokens, config, optimizer=None, dry_run=False)


def test_bytes_of_both_memories(planner: Planner) -> None:
    on_device = predicted(planner, chunk_size=512)
    on_host = predicted(planner, chunk_size=512, weights="host")
    causal = CausalModel(get_peft_model(LlamaForCausalLM(SHAPE).bfloat16(), LORA))
    weights = HostWeights(causal.layers, causal.layer_names, torch.device("cpu"))
    moved = weights.host_bytes
    assert on_host.weight_host_bytes == on_device.movable_bytes == moved
    places = weights.device_bytes
    assert on_host.parameter_bytes == on_device.parameter_bytes - moved + places
    assert on_host.host_bytes == on_device.host_bytes + moved
    assert on_host.movable_bytes == 0 and on_device.weight_host_bytes == 0

    def predict(config: oomb.Config, *_: object) -> Prediction:
        return planner.predict(4096, config, optimizer=None, dry_run=False)

    remedy = next(one for one in remedies(on_device, predict) if str(one) == "weights=host")
    assert remedy.alters == 0 and remedy.host_bytes == moved
    assert remedy.saved_bytes == moved - places


def test_the_link_hides_them_in_long_chunks(planner: Planner) -> None:
    short, long = (
        predicted(planner, 8192, chunk_size=chunk, weights="host").duration for chunk in (128, 8192)
    )
    assert short is not None and long is not None
    assert short.weights > 0 and long.weights == 0.0
    # A weight and token of the fill are 2 FLOP of at most 165e12 a second, a weight 2 bytes of at
    # most 32e9: 5,156 tokens where nothing else is computed.
    assert 128 < short.weights_hidden_from < 5156


def test_long_chunks_come_first() -> None:
    for weights, first in (("device", 4096), ("host", 16384)):
        config = oomb.Config(weights=weights)  # type: ignore[arg-type]
        assert next(candidates(config, 20000, frozenset()))[0].chunk_size == first


def test_without_frozen_weights() -> None:
    planner = Planner(SHAPE, Machine.described(gpu="h200"))
    with pytest.raises(ValueError, match="weights: expected 'device' for a model whose layers"):
        predicted(planner, weights="host")
