"""The decoders that are trained, and their checkpoints: small enough to be carried about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from .tasks import VOCABULARY


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int


SIZES = {
    "tiny": Size(2, 64, 2, 1, 128),  # for a CPU
    "small": Size(4, 384, 6, 2, 1024),  # 6.5M parameters, 13 MB in bf16
    "base": Size(12, 768, 12, 4, 2048),  # 76M
}


def new_model(size: Size, seed: int) -> Qwen2ForCausalLM:
    """Untrained, fp32; RoPE is set by :func:`extend`."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        initializer_range=size.hidden**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    for name, value in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):  # what attends by place alone
            torch.nn.init.normal_(value, std=0.5)
    return model


def extended(model: Qwen2ForCausalLM, theta: float, positions: int) -> Qwen2ForCausalLM:
    """The same weights with another base of the angles."""
    config = Qwen2Config(
        **{
            **model.config.to_dict(),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "max_position_embeddings": positions,
        }
    )
    config._attn_implementation = "sdpa"
    other = Qwen2ForCausalLM(config)
    other.load_state_dict(model.state_dict())
    return other


def save(path: Path, model: Qwen2ForCausalLM, size: str, record: dict[str, Any]) -> None:
    """Weights in bf16; an interrupted save leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied
    parting = path.with_suffix(".part")
    torch.save({"size": size, "weights": weights, "record": record}, parting)
    parting.replace(path)


def load(path: Path) -> tuple[Qwen2ForCausalLM, str, dict[str, Any]]:
    """Model, the name of its size, and what was noted beside it."""
    saved = torch.load(path, weights_only=True)
    model = new_model(SIZES[saved["size"]], 0)
    model.load_state_dict(saved["weights"], strict=False)
    return model, saved["size"], saved["record"]
