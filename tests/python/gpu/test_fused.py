"""Norms, gates, rotations and LoRA by faster forwards: gradients are those of the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import gradients
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from engine.models import VOCABULARY, of
from engine.reference import relative_error
from oomb.model.adapters import adapter_forwards, wide_product
from oomb.model.causal import CausalModel

pytestmark = pytest.mark.gpu
_SIZES = {"head_dim": 64, "hidden_size": 192, "intermediate_size": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"attn_logit_softcapping": None},
    "Gemma3": {"config": "Gemma3TextConfig", "sliding_window": 200},
    "Gemma4": {
        "config": "Gemma4TextConfig",
        "global_head_dim": 128,
        "sliding_window": 200,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 200},
    "Olmo3": {"sliding_window": 200},
    "Qwen3Moe": _EXPERTS,
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (1, 1000), generator=generator).cuda()


def made(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = of(family, **{**_SIZES, **FAMILIES[family]})
    return model.to("cuda", dtype)


def chunked(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with oomb.Engine(model, oomb.Config(chunk_size=256, page_size=64)) as engine:
        engine.forward_backward(ids(), ids())
    return gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_that_of_the_models_own_forwards(family: str) -> None:
    pytest.importorskip("liger_kernel")
    model = made(family, torch.float32)
    assert CausalModel(model).is_fused
    found = chunked(model)
    model.zero_grad()
    model(input_ids=ids(), labels=ids()).loss.backward()
    for name, gradient in gradients(model).items():
        assert relative_error(found[name], gradient) < 2e-5, name


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3Moe"])
def test_lora_in_bf16_is_as_far_from_fp32_as_pefts_own(family: str) -> None:
    def adapted(dtype: torch.dtype) -> Any:
        settings = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(made(family, dtype), settings)
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    model, exact = adapted(torch.bfloat16), adapted(torch.float32)
    exact.load_state_dict(model.state_dict())
    assert adapter_forwards(model, wide_product)
    exact(input_ids=ids(), labels=ids()).loss.backward()
    model(input_ids=ids(), labels=ids()).loss.backward()
    expected, beside = gradients(exact), gradients(model)
    found = chunked(model)
    for name, gradient in expected.items():
        limit = 2 * relative_error(beside[name], gradient) + 1e-4
        assert relative_error(found[name], gradient) < limit, name
