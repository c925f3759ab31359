"""Dropout behind the decoder: of an adapter on the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import oomb

from .models import keep_norms_in_float64, make
from .reference import Result, assert_identical, random_ids, take_gradients

CONFIG = oomb.Config(chunk_size=16, page_size=8)
IDS = random_ids(1, 40)


def adapted(probability: float) -> Any:
    """With trained adapters; in training mode, as PEFT leaves its own modules."""
    torch.manual_seed(0)
    of_head = LoraConfig(
        r=4,
        target_modules=["q_proj", "lm_head"],
        lora_dropout=probability,
        init_lora_weights=False,
    )
    model = get_peft_model(make("llama", tie_word_embeddings=False), of_head).double()
    keep_norms_in_float64(model)
    return model.train()


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_a_trained_adapter_is_accepted(probability: float) -> None:
    model = adapted(probability)
    with oomb.Engine(model, CONFIG) as engine:
        assert all(module.training for module in model.modules())
        torch.manual_seed(1)
        first = engine.forward_backward(IDS, IDS).loss
        torch.manual_seed(1)
        assert torch.equal(engine.forward_backward(IDS, IDS).loss, first)
        assert not torch.equal(engine.forward_backward(IDS, IDS).loss, first)


def test_masks_of_a_sweep_are_those_of_the_fill_where_rows_get_no_gradient() -> None:
    model = adapted(0.5)

    def swept(engine: oomb.Engine, least: float) -> Result:
        weights = torch.full(IDS.shape, least, dtype=torch.float64)
        weights[:, ::3] = 1.0
        torch.manual_seed(7)
        with engine.two_pass(IDS) as call:
            loss = (call.logprobs * weights).sum()
            loss.backward()
            call.sweep()
        return Result(loss.detach(), take_gradients(model))

    with oomb.Engine(model, CONFIG) as engine:
        assert_identical(swept(engine, 0.0), swept(engine, 1e-300))
