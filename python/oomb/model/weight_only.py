"""Frozen weights of torchao in 4 or 8 bits, unpacked for a product and again for its backward.

torchao leaves the backward to autograd, which keeps every unpacked weight from the forward on: of
all layers of a chunk that is as much as weights without quantisation. Here the packed one is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Whose product with x is x @ unpacked(weight).T, with the codes of each. A byte for each value:
# int8, float8, and up to 8 bits in a byte. Two values in a byte: NF4 and NVFP4.
_CODES = {
    "Int8Tensor": "qdata",
    "Float8Tensor": "qdata",
    "IntxUnpackedToInt8Tensor": "qdata",
    "NF4Tensor": "quantized_data",
    "NVFP4Tensor": "qdata",
}
# What they have where a product rounds or scales x too, which passes no gradient.
_OF_INPUTS = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization")


def is_of_torchao(weight: object) -> bool:
    """Whether a weight is quantised by torchao, in any format. Imports nothing."""
    kind = type(weight)
    return kind.__module__.startswith("torchao.") and isinstance(weight, torch.Tensor)


def is_weight_only(weight: object) -> bool:
    """Whether a weight of torchao can be unpacked, and nothing but the weight is quantised."""
    return type(weight).__name__ in _CODES and all(
        getattr(weight, name, None) is None for name in _OF_INPUTS
    )


def codes_of(weight: Any) -> torch.Tensor:
    """The codes of a weight of torchao: one for each value, or for two."""
    codes: torch.Tensor = getattr(weight, _CODES[type(weight).__name__])
    return codes


def parts_of(weight: Any) -> list[torch.Tensor]:
    """The tensors that a weight of torchao is made of: codes, scales and zero points."""
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def with_parts(weight: Any, parts: list[torch.Tensor]) -> Any:
    """A weight of torchao like ``weight``, of other tensors in the order of :func:`parts_of`."""
    names, attributes = weight.__tensor_flatten__()
    made = dict(zip(names, parts, strict=True))
    return type(weight).__tensor_unflatten__(made, attributes, weight.shape, weight.stride())


def unpacked(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The values of a weight of torchao, as its own product takes them."""
    if type(weight).__name__ == "NF4Tensor":  # whose dequantize is a function of other arguments
        values: torch.Tensor = weight.get_original_weight()
    else:
        values = weight.dequantize()
    return values.to(dtype)


def unpacking_forwards(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """A forward for each linear layer with such a weight, whose backward unpacks it again."""
    return {
        module: _unpacking(module)
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and is_of_torchao(module.weight)
        and is_weight_only(module.weight)
    }


def _unpacking(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return plain(x)
        apply: Callable[..., torch.Tensor] = _Unpacked.apply
        y = apply(x, module.weight)
        return y if module.bias is None else y + module.bias

    return forward


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight  # frozen
        y = F.linear(x, weight)
        # A view could not be changed in place by the model, as what a linear layer gives can.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad @ unpacked(ctx.weight, grad.dtype), None
