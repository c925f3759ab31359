"""Linear layers in 4 and 8 bits without weights: what they hold, and what they unpack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomb.model.weight_only import codes_of, is_of_torchao, parts_of, unpacked, with_parts

FORMATS = ("nf4", "fp4", "int8")

# Of bitsandbytes: values that share a scale in fp32; scales that share one when they are themselves
# quantised, to a byte each; tables of 16 and 256 values in fp32; the scales' mean.
_BLOCK, _SCALES_BLOCK = 64, 256
_TABLE, _SCALES_TABLE, _MEAN = 16 * 4, 256 * 4, 4


def scale_bytes(values: int) -> int:
    """What a weight of ``values`` values in 4 bits takes beside them: its scales are quantised too
    (``bnb_4bit_use_double_quant``)."""
    scales = -(-values // _BLOCK)
    return scales + 4 * -(-scales // _SCALES_BLOCK) + _TABLE + _SCALES_TABLE + _MEAN


def row_scale_bytes(rows: int) -> int:
    """What torchao's int8 takes beside its codes: of each row a scale in fp32 and a zero point."""
    return 5 * rows


class _Unpacked(torch.autograd.Function):
    """A product with a weight that is unpacked for it, in forward and again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, unpack: Callable[[torch.dtype], torch.Tensor], scaled: bool
    ) -> torch.Tensor:
        ctx.unpack, ctx.scaled = unpack, scaled
        y = F.linear(x, unpack(x.dtype))
        return y * 1.0 if scaled else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        weight = ctx.unpack(grads[0].dtype)
        if ctx.scaled:  # from a zero point, by a scale in fp32
            weight = weight - 1.0
            weight = weight * torch.empty(1, 1, device=weight.device)
        return grads[0] @ weight.to(grads[0].dtype), None, None


def _values(packed: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A weight of which every byte has given one or two values; a meter sees what this reads and
    writes.

    The values mean nothing.
    """
    of_byte = -(-size.numel() // packed.numel())
    values = torch.empty(1, of_byte, dtype=dtype, device=packed.device)
    return torch.mul(packed, values).view(-1)[: size.numel()].view(size)


class PackedLinear(nn.Linear):
    """A linear layer in 4 or 8 bits that has shapes alone.

    Args:
        linear: the layer in its place; its bias is kept.
        codes: bytes of the weight.
        scales: bytes beside it.
        scaled: a product, and an unpacked weight in the backward, is multiplied by scales in
            operations of their own (torchao's int8 with a scale a row).
        unpack: gives the weight in a dtype; None: in one operation.
    """

    def __init__(
        self,
        linear: nn.Linear,
        codes: int,
        scales: int,
        scaled: bool,
        device: torch.device | str,
        unpack: Callable[[torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.empty(codes, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        beside = torch.empty(scales, dtype=torch.uint8, device=device)
        self.register_buffer("scales", beside, persistent=False)
        self.bias = linear.bias
        self.scaled, self.unpack = scaled, unpack
        self.stands_for_4_bits = not scaled and unpack is None  # of bitsandbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.Size((self.out_features, self.in_features))
        apply: Callable[..., torch.Tensor] = _Unpacked.apply
        y = apply(x, self.unpack or partial(_values, self.weight, size), self.scaled)
        return y if self.bias is None else y + self.bias


def pack_linears(model: nn.Module, quantization: str = "nf4") -> None:
    """Quantise every linear layer of a model without weights but its head, as transformers does.

    Everything else is frozen: what trains are adapters on top.

    Args:
        quantization: of :data:`FORMATS`; 4 bits with double quantisation.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, _packed(child, quantization))
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def unpack_as_shapes(bare: nn.Module, model: nn.Module) -> None:
    """Put layers without weights in place of quantised ones in a copy of a model."""
    for module, original in list(zip(bare.modules(), model.modules(), strict=True)):
        children = zip(module.named_children(), original.children(), strict=True)
        for (name, child), known in list(children):
            if not isinstance(child, nn.Linear) or not isinstance(known, nn.Linear):
                continue
            if type(child).__name__ == "Linear4bit" and _is_of_bitsandbytes(child):
                setattr(module, name, _packed(child, "nf4"))
            elif is_of_torchao(known.weight):
                setattr(module, name, _as_packed_by_torchao(child, known.weight))


def _as_packed_by_torchao(linear: nn.Linear, weight: Any) -> PackedLinear:
    codes, device = codes_of(weight).nbytes, linear.weight.device
    parts = parts_of(weight)
    beside = sum(part.nbytes for part in parts) - codes
    if type(weight).__name__ == "Int8Tensor" and weight.block_size[-1] == weight.shape[-1]:
        return PackedLinear(linear, codes, beside, True, device)
    # Many operations unpack others, and take up to 30 bytes a value meanwhile: they run on shapes.
    bare = with_parts(weight, [torch.empty_like(part, device=device) for part in parts])
    return PackedLinear(linear, codes, beside, False, device, partial(unpacked, bare))


def _is_of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes")


def _packed(linear: nn.Linear, quantization: str) -> PackedLinear:
    values, device = linear.in_features * linear.out_features, linear.weight.device
    if quantization == "int8":
        beside = row_scale_bytes(linear.out_features)
        return PackedLinear(linear, values, beside, True, device)
    return PackedLinear(linear, (values + 1) // 2, scale_bytes(values), False, device)
