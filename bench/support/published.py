"""A published model's shape with random bf16 weights, all of them trained or adapters on top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from oomb.trace.published import published_config


@dataclass(frozen=True)
class Published:
    """A model, its config and its adapters; None: all weights are trained."""

    model: Any
    config: Any
    adapter: Any


def published(name: str, *, tokens: int, layers: int, lora: int, device: str) -> Published:
    """A model of docs/models.md in train mode.

    Args:
        tokens: of the longest sequence.
        layers: that are built, the first of them; 0: all.
        lora: rank of adapters on all linear layers; 0: none.

    Raises:
        SystemExit: no model of that name.
    """
    config: Any = published_config(name, **({"num_hidden_layers": layers} if layers else {}))
    if config is None:
        raise SystemExit(f"model: expected one of docs/models.md, got {name!r}")
    if layers and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.max_position_embeddings = max(config.max_position_embeddings, tokens)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter: Any = None
    if lora:
        from peft import LoraConfig, get_peft_model  # optional

        adapter = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    return Published(model.train(), config, adapter)
