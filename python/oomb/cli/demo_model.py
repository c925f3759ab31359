"""The demo's model, and a step of ordinary training to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A Qwen2 of two million parameters over bytes, with random weights."""
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**settings))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.set_attn_implementation("sdpa")
    return model


def ordinary_loss(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Loss of one ordinary forward. Cross-entropy of the logits as they are: fp64 stays fp64."""
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits[0, :-1], input_ids[0, 1:])
