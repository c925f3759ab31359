"""Tiny models whose layers hand states from token to token, beside attention or in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from .models import GAIN, VOCABULARY, spread_weights

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]

# name: (class prefix in transformers, settings besides the sizes above). The last layer has
# attention in some and a state in others: a fill ends at either.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", {**_DELTA, "layer_types": _MIXED}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_DELTA, **_EXPERTS, "layer_types": _MIXED[:2]}),
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_EXPERTS, "layer_types": _MIXED[:2]}),
    "olmo-hybrid": ("OlmoHybrid", {**_DELTA, "layer_types": _MIXED[:2]}),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "granite-4-h": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "adapter_rank": 4,
            "num_mem_blocks": 1,
        },
    ),
    "falcon-h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm3": ("Lfm3", {"layer_types": ["conv", "full_attention", "conv"]}),
    "kimi-linear": (
        "KimiLinear",
        {
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "layer_types": _MIXED[:2],
            "mlp_layer_types": ["dense", "dense"],
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "zaya": (
        "Zaya",
        {"num_experts_per_tok": 1, "num_experts": 4, "router_hidden_size": 16, "layer_types": None},
    ),
}


# With the gain of the others Zamba2 amplifies rounding: where each weight moves by its last bit,
# gradients of ordinary training move by more than the tests allow.
_GAINS = {"zamba2": 1.0}


def make_recurrent(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model of ``RECURRENT`` in eval mode, with weights that make errors show."""
    prefix, own = RECURRENT[name]
    if not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip("transformers before 5.21: layers do not ask their cache for states")
    if not hasattr(transformers, f"{prefix}ForCausalLM"):
        pytest.skip(f"this transformers has no {prefix}")
    kinds = own.get("layer_types") or own.get("layers_block_type")
    layers = {"num_hidden_layers": len(kinds)} if kinds else {}
    text = "TextConfig" if prefix.startswith("Qwen3_5") else "Config"
    config = getattr(transformers, prefix + text)(**{**_SIZES, **layers, **own, **settings})
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config)
    spread_weights(model, gain=_GAINS.get(name, GAIN))
    model.set_experts_implementation("eager")
    return model.to(dtype).eval()


@contextmanager
def nothing_rounds_to_float32() -> Iterator[None]:
    """Inside, what is fp64 stays so: transformers' recurrences, norms, routers
    and softmax ask for fp32."""
    to, single = torch.Tensor.to, torch.float32

    def kept(self: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        asked = args[0] if args else keywords.get("dtype")
        return (
            self if self.dtype == torch.float64 and asked is single else to(self, *args, **keywords)
        )

    def softmax_of(function: Any) -> Any:
        """Eager attention names fp32 as an argument of its softmax."""

        def softmax(self: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
            if self.dtype == torch.float64 and keywords.get("dtype") is single:
                del keywords["dtype"]
            result: torch.Tensor = function(self, *args, **keywords)
            return result

        return softmax

    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch, torch.nn.functional, torch.Tensor):
            for name in ("softmax", "log_softmax"):
                patch.setattr(owner, name, softmax_of(getattr(owner, name)))
        patch.setattr(torch.Tensor, "to", kept)
        patch.setattr(torch.Tensor, "type", kept)
        patch.setattr(torch.Tensor, "float", lambda self: kept(self, single))
        yield
