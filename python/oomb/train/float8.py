"""Linear layers whose products run in float8, through torchao."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from oomb.model.float8 import GPU_WANTED, RECIPE, SMALLEST_CAPABILITY, convert_linears
from oomb.train.errors import BadInput

_VARIANTS = 64  # of compiled code for one class of layers; torch gives up after eight


def with_float8(model: Any, recipe: str, device: torch.device) -> None:
    """Put torchao's layers in place of the decoder's linear ones; the head stays as it is.

    Weights keep their dtype and names. With ``"rowwise"`` layers are compiled on a GPU, which takes
    the first step some 30 s. On a CPU the products are emulated, which is slow.

    Args:
        recipe: of torchao: ``"rowwise_with_gw_hp"``, or ``"rowwise"``, whose weight gradients are
            products in float8 too.
        device: where products will run; weights may still be on the CPU.

    Raises:
        BadInput: torchao is not installed, or the GPU or the weights' dtype has no such products.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if 10 * capability[0] + capability[1] < SMALLEST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise BadInput(f"model.float8: expected {GPU_WANTED}, got {name}")
        if model.dtype != torch.bfloat16:
            raise BadInput(
                "model.float8: expected weights in bfloat16 on a GPU, got "
                f"{str(model.dtype).removeprefix('torch.')}; set model.dtype=bfloat16"
            )
    try:
        convert_linears(model, recipe, emulate=device.type != "cuda")
    except ImportError as error:
        raise BadInput(f"model.float8: {error}") from error
    if device.type == "cuda" and recipe != RECIPE:  # that one the engine runs itself
        _compile(model)


def _compile(model: nn.Module) -> None:
    """Have torch compile each layer by itself: casts that are not fused take longer than what
    products in float8 save."""
    dynamo: Any = import_module("torch._dynamo").config
    # A variant for each shape of weights, with and without bias, and again without a graph (fill).
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.compile()
