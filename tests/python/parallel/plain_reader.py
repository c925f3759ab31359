"""Reads a checkpoint's optimizer as other programs do: with torch and transformers alone.

python plain_reader.py CHECKPOINT FILE    # states by name, as safetensors
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


def states(model: nn.Module, checkpoint: str) -> dict[str, torch.Tensor]:
    """What an optimizer of a model, whole or sharded, has loaded: whole."""
    optimizer = torch.optim.AdamW(model.parameters())
    state: Any = get_optimizer_state_dict(model, optimizer)
    reader = HuggingFaceStorageReader(f"{checkpoint}/optimizer")
    dcp.load({"optimizer": {"state": state["state"]}}, storage_reader=reader)
    set_optimizer_state_dict(model, optimizer, state)
    return {
        f"{name}.{key}": x.full_tensor() if isinstance(x, DTensor) else x
        for name, parameter in model.named_parameters()
        for key, x in optimizer.state[parameter].items()
    }


if __name__ == "__main__":
    found = states(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto"), sys.argv[1])
    assert not any(name.startswith("oomb") for name in sys.modules)
    save_file(found, sys.argv[2])
