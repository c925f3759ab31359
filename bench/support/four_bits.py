"""Linear layers of a model in NF4 of bitsandbytes, packed one at a time on the GPU."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


def in_four_bits(model: PreTrainedModel) -> None:
    """Packs every linear layer but the head, with double quantisation."""
    from bitsandbytes.nn import Linear4bit, Params4bit  # optional

    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                packed = Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                packed.bias = child.bias
                packed.weight = Params4bit(
                    child.weight.data,
                    requires_grad=False,
                    quant_type="nf4",
                    compress_statistics=True,
                    module=packed,
                )
                setattr(module, name, packed.to(child.weight.device))  # packs it
    model.is_loaded_in_4bit = True  # how peft knows them
