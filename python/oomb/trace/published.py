"""Published models by name: the sizes that their configs give, for plans and benches offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _gemma4(layers: int, period: int, heads: int, others: int, **settings: Any) -> dict[str, Any]:
    """Every ``period``-th layer sees everything, with heads of 512 and ``others`` of keys."""
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return {
        "num_hidden_layers": layers,
        "layer_types": (kinds * layers)[:layers],
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": others,
        "vocab_size": 262144,
        **settings,
    }


# Model: its model type, and what of its config is not the default of that type's class.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": (
        "llama",
        {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    ),
    "Llama 3.3 70B": (
        "llama",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
        },
    ),
    "Qwen2.5 7B": (
        "qwen2",
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
        },
    ),
    "Qwen3 8B": (
        "qwen3",
        {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288},
    ),
    "Qwen3 32B": (
        "qwen3",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 25600,
        },
    ),
    "Qwen3 30B-A3B": ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "Qwen3.5 9B": ("qwen3_5_text", {}),
    "Qwen3.5 27B": (
        "qwen3_5_text",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "intermediate_size": 17408,
            "linear_num_value_heads": 48,
        },
    ),
    "Qwen3-Next 80B-A3B": ("qwen3_next", {}),
    "Gemma 3 12B": (
        "gemma3_text",
        {
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 15360,
            "sliding_window": 1024,
        },
    ),
    "Gemma 3 27B": (
        "gemma3_text",
        {
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "intermediate_size": 21504,
            "sliding_window": 1024,
        },
    ),
    "Gemma 4 E2B": (
        "gemma4_text",
        _gemma4(35, 5, 1, 1, hidden_size=1536, num_kv_shared_layers=20),
    ),
    "Gemma 4 E4B": (
        "gemma4_text",
        _gemma4(42, 6, 2, 2, hidden_size=2560, num_kv_shared_layers=18),
    ),
    "Gemma 4 31B": (
        "gemma4_text",
        _gemma4(
            60,
            6,
            16,
            4,
            hidden_size=5376,
            num_attention_heads=32,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            sliding_window=1024,
        ),
    ),
    "Llama 4 Scout": ("llama4_text", {}),
    "gpt-oss 20B": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss 120B": ("gpt_oss", {}),
    "Olmo 3 7B": ("olmo3", {}),
    "Falcon 7B": ("falcon", {}),
    "Falcon 40B": (
        "falcon",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "ffn_hidden_size": 32768,
            "new_decoder_architecture": True,
        },
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "MiniCPM3 4B": ("minicpm3", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
        },
    ),
    "Nemotron 3 Nano 30B": (
        "nemotron_h",
        {
            "hidden_size": 2688,
            "layers_block_type": [
                {"M": "mamba", "E": "moe", "*": "attention"}[x] for x in _NEMOTRON_3_NANO
            ],
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
    ),
}


def published_config(name: str, **settings: Any) -> PretrainedConfig | None:
    """The config of a model of :data:`PUBLISHED`, whose name may be written ``qwen3.5-9b``.

    Args:
        settings: of the config, in place of the model's own.

    Returns:
        None where there is no such model.
    """
    from transformers import AutoConfig  # heavy

    found = {model_name(model): model for model in PUBLISHED}.get(model_name(name))
    if found is None:
        return None
    family, own = PUBLISHED[found]
    config: PretrainedConfig = AutoConfig.for_model(family, **{**own, **settings})
    return config


def model_name(name: str) -> str:
    """As a name is written on a command line: small letters, no spaces."""
    return name.lower().replace(" ", "-")
