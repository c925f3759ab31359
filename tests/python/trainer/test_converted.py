"""Checkpoints that transformers saves under other names than the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from oomb.hf.converted import load_converted

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def gemma() -> Any:
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=_SIZES, vision_config={**tower, "vision_use_head": False}
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mixture() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES, **experts))


@pytest.mark.parametrize("make", [gemma, mixture])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_loaded_as_it_was(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    model, other = make().to(dtype), make().to(dtype)
    for each in (model, other):  # one that is wider than the rest
        each.get_decoder().norm.float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter, dtype=torch.float32))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(other.state_dict()) - set(file.keys())
    load_converted(other, str(tmp_path))
    for name, value in model.state_dict().items():
        assert other.state_dict()[name].dtype == value.dtype
        assert torch.equal(other.state_dict()[name], value), name
