"""Tiny models with experts whose layers see a window or a block: in a mask, with sinks, in turn."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from . import block_models
from .models import of, spread_weights

_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOW = 12  # tokens: less than a chunk, and no multiple of a page
_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "use_sliding_window": True,
    "sliding_window": _WINDOW,
}
_LLAMA4 = "llama4"

# name: class prefix in transformers, settings of models.of besides its sizes
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    _LLAMA4: ("Llama4", {}),  # blocks
    "mimo-v2": (  # layers with a window have sinks and twice the key heads; values are narrower
        "MiMoV2Flash",
        {
            "num_hidden_layers": 3,
            "layer_types": [_FULL, _SLIDING, _FULL],
            "num_attention_heads": 8,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": _WINDOW,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3.5-moe": (  # its attention function is not told of the window, which is in the mask alone
        "Phimoe",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "sliding_window": _WINDOW,
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
        },
    ),
    "qwen2-moe": (  # likewise
        "Qwen2Moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
        },
    ),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
}


def make_windowed(name: str) -> PreTrainedModel:
    """A model of ``WINDOWED`` in fp64 and eval mode. Inside it rounds to fp32, unless that is kept
    off."""
    if name == _LLAMA4:
        return block_models.make(_WINDOW)
    prefix, settings = WINDOWED[name]
    model: PreTrainedModel = of(prefix, **settings)
    spread_weights(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")  # no sinks in sdpa
    model.set_experts_implementation("eager")
    return model.double().eval()
