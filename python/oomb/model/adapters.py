"""LoRA in fp32 beside layers in bf16, without casting activations to fp32.

PEFT keeps adapters in fp32, casts every input of an adapted layer to fp32, multiplies there, adds,
and casts back. Here an adapter is split into two parts in bf16, A = A1 + A2, and so is what passes
between A and B. All products then take factors in bf16 and add up in fp32:

    u  = s x A^T        x [A1 A2]^T, the two halves added
    y += u B^T          [u1 u1 u2] [B1 B2 B1]^T, added to y within the product

Left out is u2 B2: products are exact to some 2^-16, and the layer's output is rounded to 2^-9.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomb.model.linear import runs_as_is

# [rows, columns] in fp32 of two matrices in bf16.
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# PEFT's, whose forward adds an adapter's product and does nothing more.
_LAYERS = ("Linear", "Linear4bit", "TorchaoLoraLinear")


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` in fp32, of factors in bf16."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def adapter_forwards(decoder: nn.Module, product: Product) -> dict[nn.Module, Callable[..., Any]]:
    """A faster forward, for one call, of each adapted linear layer that can have one; it falls back
    on the module's own where it is run in another way.

    Args:
        product: :func:`wide_product`, or what stands in for it.
    """
    if find_spec("peft") is None:
        return {}
    from peft.tuners.lora.layer import Linear  # optional

    kinds: tuple[type, ...] = (Linear,)
    return {
        module: _AdaptedForward(module, product)
        for module in decoder.modules()
        if type(module).__name__ in _LAYERS and _is_lora(module, kinds)
    }


def _is_lora(module: nn.Module, kinds: tuple[type, ...]) -> bool:
    if "forward" in vars(module):
        return False
    return isinstance(module, kinds) or type(module).__module__ == "peft.tuners.lora.bnb"


def device_multiplies_wide(device: torch.device) -> bool:
    """Whether a device's products of bf16 come in fp32."""
    return device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype")  # torch >= 2.8


class _Factors:
    """An adapter as its products take it: a [3 r, in] of A, b [3 r, out] of B^T."""

    def __init__(self, a: Any, b: Any, scale: float, product: Product) -> None:
        with torch.no_grad():
            self.a, self.b = _weight_factor(a.weight), _weight_factor(b.weight.t())
        self._scale, self._product = scale, product

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The factor of ``b`` in y: [rows, 3 r] of scale * x A^T."""
        return self._times(x.reshape(-1, x.shape[-1]), self.a)

    def _times(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = weight[: weight.shape[0] // 3 * 2]
        return _row_factor(_sum_of_halves(self._product(x, parts.t())) * self._scale)

    def backward(
        self, d_y: torch.Tensor, x: torch.Tensor, left: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The factor of ``a`` in the gradient of x, [rows, 3 r], and the gradients of A and B."""
        d_rows, rows = d_y.reshape(-1, d_y.shape[-1]), x.reshape(-1, x.shape[-1])
        right, rank = self._times(d_rows, self.b), left.shape[1] // 3
        d_b = _sum_of_halves(self._product(d_rows.t(), left[:, rank:]))
        d_a = _sum_of_halves(self._product(rows.t(), right[:, rank:]))
        return right, d_a.t(), d_b


class _AdaptedForward:
    """A LoRA layer's forward during one call, in which adapters keep their values."""

    def __init__(self, module: Any, product: Product) -> None:
        self._module, self._product, self._plain = module, product, module.forward
        self._factors: _Factors | None = None

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = None if args or kwargs else self._adapter(x)
        if adapter is None:
            return self._stock(x, *args, **kwargs)
        a, b, scale = adapter
        base: Any = self._module.base_layer
        if torch.is_autocast_enabled(x.device.type):  # which casts to fp32 and back without this
            y = base(x)
            together: torch.Tensor = (y + b(a(x)) * scale).to(y.dtype)
            return together
        if self._factors is None:
            self._factors = _Factors(a, b, scale, self._product)
        factors = a.weight, b.weight, self._factors
        frozen = not any(p.requires_grad for p in base.parameters())
        if frozen and runs_as_is(base):
            whole: Callable[..., torch.Tensor] = _AdaptedLinear.apply
            return whole(x, base.weight, base.bias, *factors)
        y = base(x)
        if y.dtype != x.dtype:
            return self._stock(x)
        added: Callable[..., torch.Tensor] = _Adapted.apply
        return added(y, x, *factors)

    def _stock(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = self._plain(*args, **kwargs)
        return y

    def _adapter(self, x: torch.Tensor) -> tuple[Any, Any, float] | None:
        """The one that is active: layers A and B, and what their product is scaled by; None where
        the call is for the module's own forward."""
        m, kind = self._module, x.device.type
        autocast = torch.is_autocast_enabled(kind)
        if x.dtype != torch.bfloat16 or (autocast and torch.get_autocast_dtype(kind) != x.dtype):
            return None
        if m.disable_adapters or m.merged or len(m.active_adapters) != 1:
            return None
        (name,) = m.active_adapters
        if name not in m.lora_A or name in m.lora_variant:
            return None
        a, b, dropout = m.lora_A[name], m.lora_B[name], m.lora_dropout[name]
        drops = not isinstance(dropout, nn.Identity) and dropout.training
        if drops or not all(runs_as_is(x) and x.bias is None for x in (a, b)):
            return None
        if not a.weight.dtype == b.weight.dtype == torch.float32 or not m.cast_input_dtype_enabled:
            return None
        return a, b, float(m.scaling[name])


def _tripled(x: torch.Tensor, dim: int, order: tuple[int, int, int]) -> torch.Tensor:
    """x = parts[0] + parts[1], up to 2^-16, both in bf16; three of them side by side."""
    first = x.to(torch.bfloat16)
    parts = first, (x - first).to(torch.bfloat16)
    return torch.cat([parts[number] for number in order], dim)


def _weight_factor(weight: torch.Tensor) -> torch.Tensor:
    """[w1; w2; w1], whose upper two thirds are the parts; weight [r, n] in fp32."""
    return _tripled(weight, 0, (0, 1, 0))


def _row_factor(u: torch.Tensor) -> torch.Tensor:
    """[u1 u1 u2], whose right two thirds are the parts; u [rows, r] in fp32."""
    return _tripled(u, 1, (0, 0, 1))


def _sum_of_halves(parts: torch.Tensor) -> torch.Tensor:
    rank = parts.shape[1] // 2
    return parts[:, :rank] + parts[:, rank:]


class _Adapted(torch.autograd.Function):
    """y + scale * x A^T B^T."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        factors: _Factors,
    ) -> torch.Tensor:
        left = factors.rows(x)
        ctx.save_for_backward(x, left)
        ctx.factors = factors
        added = torch.addmm(y.reshape(-1, y.shape[-1]), left, factors.b)
        return added.view(y.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_y,) = grads
        x, left = ctx.saved_tensors
        right, d_a, d_b = ctx.factors.backward(d_y, x, left)
        d_x = (right @ ctx.factors.a).view(x.shape) if ctx.needs_input_grad[1] else None
        return d_y, d_x, d_a, d_b, None


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + bias + scale * x A^T B^T, where W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        factors: _Factors,
    ) -> torch.Tensor:
        left = factors.rows(x)
        ctx.save_for_backward(x, left, weight)
        ctx.factors = factors
        y = F.linear(x.reshape(-1, x.shape[-1]), weight, bias).addmm_(left, factors.b)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_y,) = grads
        x, left, weight = ctx.saved_tensors
        right, d_a, d_b = ctx.factors.backward(d_y, x, left)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (d_y.reshape(-1, d_y.shape[-1]) @ weight).addmm_(right, ctx.factors.a)
            d_x = d_x.view(x.shape)
        return d_x, None, None, d_a, d_b, None
