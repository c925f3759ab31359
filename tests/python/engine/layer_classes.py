"""Models whose layers differ in heads and head dims, and read one another's keys and values.

In structure those are the released sizes of Gemma 4, and Gemma 3n; only their numbers are small.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .models import VOCABULARY, spread_weights

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "sliding_window": 12,
    "vocab_size_per_layer_input": VOCABULARY,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# name: class prefix in transformers, settings besides the sizes above
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-31b": (  # global layers have a quarter of the heads, twice as wide, and K = V
        "Gemma4",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    "gemma4-26b-a4b": (
        "Gemma4",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    "gemma4-e2b": (  # the upper four of seven layers read the keys and values of lower ones
        "Gemma4",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "head_dim": 8,
            "num_key_value_heads": 2,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 5,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        },
    ),
}


# The class that checkpoints are of; here without a tower, on text alone.
WITH_IMAGES = "gemma4-e2b with images"
CLASSES[WITH_IMAGES] = CLASSES["gemma4-e2b"]


def make(name: str, dtype: torch.dtype = torch.float64, **sizes: Any) -> PreTrainedModel:
    """A model of ``CLASSES`` in eval mode; what rounds to fp32 inside stays in its own dtype."""
    prefix, settings = CLASSES[name]
    layers = len(settings["layer_types"])
    config = getattr(transformers, f"{prefix}TextConfig")(
        **{**_SIZES, **settings, **sizes, "num_hidden_layers": layers}
    )
    model: PreTrainedModel
    if name == WITH_IMAGES:
        tokens = dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 0)
        whole = transformers.Gemma4Config(
            text_config=config, vision_config=None, audio_config=None, **tokens
        )
        model = transformers.Gemma4ForConditionalGeneration(whole)
    else:
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    spread_weights(model)
    model = model.to(dtype).eval()
    model.set_attn_implementation("sdpa")
    if settings.get("enable_moe_block"):
        model.set_experts_implementation("eager")
    for module in model.modules():
        if type(module).__name__ in ("Gemma4RMSNorm", "Gemma3nRMSNorm"):
            module.forward = _norm(module)  # type: ignore[method-assign]
    return model


def _norm(norm: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        return scaled * norm.weight if norm.with_scale else scaled

    return forward


def only_upper_half(model: nn.Module) -> None:
    """Weights of the lower layers and of all embeddings are frozen."""
    layers = model.model.layers  # type: ignore[union-attr]
    model.requires_grad_(False)
    for layer in list(layers)[len(layers) // 2 :]:  # type: ignore[arg-type]
        layer.requires_grad_(True)
