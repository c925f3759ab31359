"""Linear layers in 4 bits as they are without weights: what they hold, and what they unpack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

FORMATS = ("nf4", "fp4")

# Of bitsandbytes: values that share a scale in fp32; scales that share one when they are themselves
# quantised, to a byte each; tables of 16 and 256 values in fp32; the scales' mean.
_BLOCK, _SCALES_BLOCK = 64, 256
_TABLE, _SCALES_TABLE, _MEAN = 16 * 4, 256 * 4, 4


def scale_bytes(values: int, double: bool) -> int:
    """What a weight of ``values`` values in 4 bits takes beside them.

    Args:
        double: scales are quantised too (``bnb_4bit_use_double_quant``).
    """
    scales = -(-values // _BLOCK)
    if not double:
        return 4 * scales + _TABLE
    return scales + 4 * -(-scales // _SCALES_BLOCK) + _TABLE + _SCALES_TABLE + _MEAN


class _Unpacked(torch.autograd.Function):
    """A product with a weight that is unpacked for it, in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, size: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.size = size
        return F.linear(x, _unpacked(packed, size, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (packed,) = ctx.saved_tensors
        return grads[0] @ _unpacked(packed, ctx.size, grads[0].dtype), None, None


def _unpacked(packed: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A weight of which every byte has given two values; a meter sees what this reads and writes.

    The values mean nothing.
    """
    pair = torch.empty(1, 2, dtype=dtype, device=packed.device)
    return torch.mul(packed, pair).view(-1)[: size.numel()].view(size)


class PackedLinear(nn.Linear):
    """A linear layer in 4 bits that has shapes alone.

    Args:
        linear: the layer in its place; its bias is kept.
        double: as of :func:`scale_bytes`.
    """

    def __init__(self, linear: nn.Linear, double: bool, device: torch.device | str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        values = self.in_features * self.out_features
        packed = torch.empty((values + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = torch.empty(scale_bytes(values, double), dtype=torch.uint8, device=device)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.Size((self.out_features, self.in_features))
        apply: Callable[..., torch.Tensor] = _Unpacked.apply
        y = apply(x, self.weight, size)
        return y if self.bias is None else y + self.bias


def pack_linears(model: nn.Module, double: bool = True) -> None:
    """Put every linear layer of a model without weights but its head in 4 bits, as transformers do.

    Everything else is frozen: what trains are adapters on top.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    _replace(model, {id(m) for m in model.modules() if type(m) is nn.Linear} - {id(head)}, double)
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def unpack_as_shapes(model: nn.Module) -> None:
    """Put layers without weights in place of bitsandbytes' own in a copy of a model."""
    own = {
        id(m)
        for m in model.modules()
        if type(m).__name__ == "Linear4bit" and type(m).__module__.startswith("bitsandbytes")
    }
    _replace(model, own, double=True)


def _replace(model: nn.Module, ids: set[int], double: bool) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if id(child) in ids and isinstance(child, nn.Linear):
                device = child.weight.device
                setattr(module, name, PackedLinear(child, double, device))
