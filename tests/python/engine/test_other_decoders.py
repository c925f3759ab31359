"""Decoders of the same parts train exactly without a line for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import transformers
from torch import nn

import oomb

from .models import SIZES, make, of, spread_weights
from .recurrent_models import nothing_rounds_to_float32
from .reference import assert_equal, chunked, ordinary, random_ids

CONFIG = oomb.Config(chunk_size=16, page_size=8)

# Decoders of the same parts, at most with another window, experts, or positions that are learnt.
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma": {},
    "Starcoder2": {},
    "Olmo2": {},
    "StableLm": {},
    "SmolLM3": {},  # layers without rotary angles
    "GPTNeoX": {"num_key_value_heads": 6},
    "Phi": {},  # partial rotary
    "Gemma3": {"config": "Gemma3TextConfig", "sliding_window": 12},  # angles per kind of layer
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 12},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "Gemma4": {  # the output of its decoder has further parts
        "config": "Gemma4TextConfig",
        "sliding_window": 12,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "Gemma3n": {  # an inner size per layer
        "config": "Gemma3nTextConfig",
        "sliding_window": 12,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
    },
    "Gemma4 with shared keys": {  # later layers read the keys of earlier ones
        "sliding_window": 12,
        "global_head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2,
    },
    "Gemma3n with shared keys": {
        "sliding_window": 12,
        "head_dim": 256,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "ModernBertDecoder": {  # its get_decoder() is its output layer
        "num_key_value_heads": 6,
        "local_attention": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DeepseekV2": {  # angles as complex numbers
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 6,
        "first_k_dense_replace": 2,
    },
    "MiMoV2Flash": {  # layers with a window have sinks and twice the key heads; values are narrower
        "num_attention_heads": 8,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
    },
    "Bert": {"model": "BertLMHeadModel", "is_decoder": True},  # layers one level further inside
    "GPTBigCode": {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders_of_the_same_parts_work(name: str) -> None:
    settings = dict(OTHERS[name])
    prefix = name.split(" ")[0]
    text = "Text" if prefix.startswith(("Gemma3n", "Gemma4")) else ""
    model = of(prefix, **{"config": f"{prefix}{text}Config", **settings})
    spread_weights(model)
    model = model.double()
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")  # no sinks in sdpa
    model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("key.bias"):  # softmax takes it away: its gradient is 0
            parameter.requires_grad_(False)
    ids = random_ids(2, 60)
    with nothing_rounds_to_float32():
        expected = ordinary(model, ids, ids)
        for recompute in ("none", "layer"):
            config = replace(CONFIG, recompute=recompute)
            assert_equal(chunked(model, config, ids, ids), expected)


@dataclass(frozen=True)
class LayerConfig:
    """As torchao's Float8LinearConfig: none of transformers', and nobody may write to it."""

    round_scales_to_power_of_2: bool = False


class ConfiguredLinear(nn.Linear):
    config = LayerConfig()


def test_layers_with_a_config_of_another_kind() -> None:
    model = make("llama").eval()
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = ConfiguredLinear
    ids = random_ids(2, 60)
    assert_equal(chunked(model, CONFIG, ids, ids), ordinary(model, ids, ids), 1e-10)


def vision_text(name: str, **vision: Any) -> nn.Module:
    """Positions count time, height and width; text moves through all three alike."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config={**sizes, "out_hidden_size": 48, **vision},
    )
    made: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return made


@pytest.mark.parametrize(
    ("name", "vision"),
    [
        ("Qwen2_5_VL", {"fullatt_block_indexes": [0]}),
        ("Qwen3VL", {"deepstack_visual_indexes": [0]}),
    ],
)
def test_models_that_also_see_pictures_train_on_text(name: str, vision: dict[str, Any]) -> None:
    model = vision_text(name, **vision)
    spread_weights(model)
    model = model.double().eval()
    ids = random_ids(2, 60)
    with nothing_rounds_to_float32():
        expected = ordinary(model, ids, ids)
        assert_equal(chunked(model, CONFIG, ids, ids), expected)
    # The model's own angles are those of fp32: fp64 differs by what they round.
    other = replace(CONFIG, rope_angles="float64")
    assert_equal(chunked(model, other, ids, ids), expected, 1e-5)
