"""Tiny models of every architecture that must be exact, with weights that make errors show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

VOCABULARY = 97

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Of models that one test makes with :func:`of`.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}

# name: (class prefix in transformers, settings besides the sizes above)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "phi3": ("Phi3", {}),
    "gpt-oss": (
        "GptOss",
        {
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma2": (  # caps so low that both are felt
        "Gemma2",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "vaultgemma": (
        "VaultGemma",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite": (
        "Granite",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.2}),
    "cohere-norm": ("Cohere", {"logit_scale": 0.2, "use_qk_norm": True}),
}

CAPPED = "soft_capped"


def _soft_capped(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As Gemma 2's eager one, whose softmax rounds to fp32."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = softcap * torch.tanh(query @ key.mT * scaling / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(CAPPED, _soft_capped)
AttentionMaskInterface.register(CAPPED, eager_mask)

# Rotary variants on top of an architecture; 40 positions are "short" for them, 75 "long".
_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", **_SCALED}}),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", **_SCALED}, "max_position_embeddings": 160},
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 40,
        },
    ),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
                **_SCALED,
            },
            "max_position_embeddings": 160,
            "original_max_position_embeddings": 40,
        },
    ),
}


def make(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """A model of ``ARCHITECTURES`` in eval mode, its norms in its own dtype if that is fp64."""
    prefix, own = ARCHITECTURES[name]
    config_class = getattr(transformers, f"{prefix}Config")
    sizes = {**_SIZES, **own, **settings}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    config = config_class(**sizes)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if prefix == "GptOss":  # sinks need eager attention; other experts kernels know no fp64
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
    elif prefix in ("Gemma2", "VaultGemma"):  # sdpa knows no soft cap
        model.set_attn_implementation(CAPPED)
    else:
        model.set_attn_implementation("sdpa")
    spread_weights(model)
    model = model.to(dtype)
    if dtype == torch.float64:
        keep_norms_in_float64(model)
    return model.eval()


def of(prefix: str, **settings: Any) -> Any:
    """A causal model of ``SIZES`` in eval mode, with the weights that its class gives it.

    Args:
        settings: of its config; ``config`` and ``model`` name other classes than the prefix does.
    """
    kind = getattr(transformers, settings.pop("config", f"{prefix}Config"))
    build = getattr(transformers, settings.pop("model", f"{prefix}ForCausalLM"))
    return build(kind(**{**SIZES, **settings})).eval()


GAIN = 1.5  # of made-up weights


def spread_weights(model: nn.Module, seed: int = 1, gain: float = GAIN) -> None:
    """Weights of about unit gain and norms, biases and sinks off their neutral values.

    With the library's initial weights attention is nearly uniform, and a wrong page would hardly
    change a result.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter, dtype=torch.float32).normal_(generator=generator)
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)


def keep_norms_in_float64(model: nn.Module) -> None:
    """Replace forwards that round to fp32 inside, for chunked and ordinary training alike."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("Gemma2RMSNorm", "VaultGemmaRMSNorm"):
            module.forward = _gemma_norm(module)
        elif kind.endswith("RMSNorm"):
            module.forward = _rms_norm(module)
        elif kind == "CohereLayerNorm":
            module.forward = _layer_norm(module)


def _rms_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (x * scale)  # type: ignore[no-any-return]

    return forward


def _gemma_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (1 + norm.weight) * (x * scale)  # type: ignore[no-any-return]

    return forward


def _layer_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (centred * scale)  # type: ignore[no-any-return]

    return forward
