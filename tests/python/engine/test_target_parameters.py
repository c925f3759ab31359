"""PEFT's ``target_parameters``: a product has another weight while its adapter's forward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import oomb

from .models import keep_norms_in_float64, make
from .reference import assert_equal, chunked, ordinary, random_ids

TARGETS = ["mlp.down_proj.weight"]


def adapted(targets: list[str]) -> Any:
    model = make("llama", intermediate_size=512, num_hidden_layers=3)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"target_modules": [], "target_parameters": targets}
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings)).double()
    keep_norms_in_float64(model)
    return model.eval()


@pytest.mark.parametrize("keep", ["none", "auto", 1.0])
@pytest.mark.parametrize("targets", [TARGETS, [*TARGETS, "mlp.up_proj.weight"]], ids=len)
def test_every_chunk_gives_the_adapter_gradient(targets: list[str], keep: Any) -> None:
    ids = random_ids(1, 128)
    config = oomb.Config(chunk_size=16, page_size=8, keep_outputs=keep)
    assert_equal(chunked(adapted(targets), config, ids, ids), ordinary(adapted(targets), ids, ids))
