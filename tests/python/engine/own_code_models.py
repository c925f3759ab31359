"""Tiny models whose attention modules do not go through transformers' interface."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .models import VOCABULARY, spread_weights

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "ffn_hidden_size": 64,
    "alibi": False,
    "multi_query": False,
    "parallel_attn": True,
    "bias": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name: settings of Falcon besides the sizes above
OWN_CODE: dict[str, dict[str, Any]] = {
    "falcon-7b": {"multi_query": True},
    "falcon-40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-11b": {  # one norm for attention and what is beside it
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "num_hidden_layers": 2,
    },
    "falcon-in-turn": {"parallel_attn": False, "bias": True},
}


def make_own_code(
    name: str, dtype: torch.dtype = torch.float64, **settings: Any
) -> PreTrainedModel:
    """A model of ``OWN_CODE`` in eval mode, with weights that make errors show."""
    config = transformers.FalconConfig(**{**_SIZES, **OWN_CODE[name], **settings})
    model: PreTrainedModel = transformers.FalconForCausalLM(config)
    spread_weights(model)
    for part, weight in model.named_parameters():
        if "ln_" in part and part.endswith("weight"):  # a norm, by another name
            weight.data.add_(1)
    return model.to(dtype).eval()
