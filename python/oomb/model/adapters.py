"""LoRA in fp32 beside layers in bf16, without casting activations to fp32.

PEFT keeps adapters in fp32, casts every input of an adapted layer to fp32, multiplies there, adds,
and casts back. Here an adapter is split into two parts in bf16, A = A1 + A2, and so is what passes
between A and B. All products then take factors in bf16 and add up in fp32:

    u  = s x A^T        x [A1 A2]^T, the two halves added
    y += u B^T          [u1 u1 u2] [B1 B2 B1]^T, added to y within the product

Left out is u2 B2: products are exact to some 2^-16, and the layer's output is rounded to 2^-9.

A layer in 4 bits of bitsandbytes is unpacked in the same autograd function: few steps of Python per
layer are what keeps short chunks from waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomb import _C
from oomb.model import remade
from oomb.model.linear import Known, is_watched, runs_as_is

# PEFT's, whose forward adds an adapter's product and does nothing more.
_LAYERS = ("Linear", "Linear4bit", "TorchaoLoraLinear")


class Products:
    """What adapters are computed with; a plan puts shapes in their place."""

    def wide(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """``left @ right`` in fp32, of factors in bf16."""
        if left.is_cuda:
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()

    def row_factor(self, halves: torch.Tensor, scale: float) -> torch.Tensor:
        """[u1 u1 u2] in bf16, [rows, 3 r], whose right two thirds are the parts of u.

        Args:
            halves: [rows, 2 r] in fp32; u is the sum of both, times ``scale``.
        """
        rows, columns = halves.shape
        factor = halves.new_empty((rows, columns // 2 * 3), dtype=torch.bfloat16)
        stream = torch.cuda.current_stream(halves.device).cuda_stream if halves.is_cuda else 0
        _C.row_factor(halves=halves, factor=factor, scale=scale, stream=stream)
        return factor


def adapter_forwards(decoder: nn.Module, products: Products) -> dict[nn.Module, Callable[..., Any]]:
    """A faster forward, for one call, of each adapted linear layer that can have one; it falls back
    on the module's own where it is run in another way.
    """
    if find_spec("peft") is None:
        return {}
    from peft.tuners.lora.layer import Linear  # optional

    kinds: tuple[type, ...] = (Linear,)
    return {
        module: AdaptedForward(module, products)
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

    def __init__(self, a: Any, b: Any, scale: float, products: Products) -> None:
        with torch.no_grad():
            self.a, self.b = _weight_factor(a.weight), _weight_factor(b.weight.t())
        parts = self.a.shape[0] // 3 * 2
        self._of_a, self._of_b = self.a[:parts].t(), self.b[:parts].t()
        self._scale, self._products = scale, products

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The factor of ``b`` in y: [rows, 3 r] of scale * x A^T; x [rows, in]."""
        return self._products.row_factor(self._products.wide(x, self._of_a), self._scale)

    def backward(
        self, d_y: torch.Tensor, x: torch.Tensor, left: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The factor of ``a`` in the gradient of x, [rows, 3 r], and the gradients of A and B.

        Args:
            d_y: [rows, out]
            x: [rows, in]
            left: of :meth:`rows`.
        """
        wide, rank = self._products.wide, left.shape[1] // 3
        right = self._products.row_factor(wide(d_y, self._of_b), self._scale)
        d_b = _sum_of_halves(wide(d_y.t(), left[:, rank:]))
        d_a = _sum_of_halves(wide(x.t(), right[:, rank:]))
        return right, d_a.t(), d_b


def runs_beside(module: nn.Module, products: Products) -> bool:
    """Whether :func:`adapter_forwards` runs a layer and the adapter beside it as one function, of
    inputs in bf16."""
    if type(module).__name__ not in _LAYERS:
        return False
    base: Any = getattr(module, "base_layer", None)
    forward = AdaptedForward(module, products)
    if getattr(base, "stands_for_4_bits", False):
        return forward.adapter is not None
    if type(base) is nn.Linear and base.weight.dtype != torch.bfloat16:
        return False
    return forward.adapter is not None and forward.beside is not None


class AdaptedForward:
    """A LoRA layer's forward during one call, in which adapters and settings keep their values."""

    def __init__(self, module: Any, products: Products) -> None:
        self._module, self._products, self._plain = module, products, module.forward

    def __call__(
        self, x: torch.Tensor, *args: Any, known: Known = None, **kwargs: Any
    ) -> torch.Tensor:
        """
        Args:
            known: the output; not asked where layer and adapter are not one function.
        """
        adapter = None if args or kwargs or x.dtype != torch.bfloat16 else self.adapter
        if adapter is None:
            return self._stock(x, *args, **kwargs)
        a, b, scale = adapter
        base: Any = self._module.base_layer
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # which casts to fp32 and back without this
            if torch.get_autocast_dtype(kind) != x.dtype:
                return self._stock(x)
            y = base(x)
            together: torch.Tensor = (y + b(a(x)) * scale).to(y.dtype)
            return together
        factors = a.weight, b.weight, self._factors
        if self.beside is not None:
            return self.beside(x, base.weight, base.bias, *factors, known)
        y = base(x)
        if y.dtype != x.dtype:
            return self._stock(x)
        added: Callable[..., torch.Tensor] = _Adapted.apply
        return added(y, x, *factors)

    def _stock(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = self._plain(*args, **kwargs)
        return y

    @cached_property
    def _factors(self) -> _Factors:
        assert self.adapter is not None
        return _Factors(*self.adapter, self._products)

    @cached_property
    def beside(self) -> Callable[..., torch.Tensor] | None:
        """The layer and the adapter beside it in one function; None: the layer has its own way."""
        base: Any = self._module.base_layer
        if any(p.requires_grad for p in base.parameters()):
            return None
        if runs_as_is(base):
            return _AdaptedLinear.apply
        return _AdaptedPacked.apply if _is_packed(base) else None

    @cached_property
    def adapter(self) -> tuple[Any, Any, float] | None:
        """The one that is active: layers A and B, and what their product is scaled by; None where
        the call is for the module's own forward."""
        m = self._module
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


def _is_packed(base: Any) -> bool:
    """Whether a layer of bitsandbytes unpacks 4 bits to bf16, multiplies, and does nothing more."""
    if type(base).__name__ != "Linear4bit" or not type(base).__module__.startswith("bitsandbytes"):
        return False
    state = getattr(base.weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False) or is_watched(base):
        return False
    in_order = tuple(state.shape) == (base.out_features, base.in_features)
    # Without a type of its own a layer takes its first input's.
    types = {state.dtype, base.compute_dtype or torch.bfloat16}
    if base.bias is not None:
        types.add(base.bias.dtype)
    return in_order and types == {torch.bfloat16}


def _weight_factor(weight: torch.Tensor) -> torch.Tensor:
    """[w1; w2; w1] in bf16, whose upper two thirds are the parts: weight = w1 + w2, up to 2^-16.

    Args:
        weight: [r, n] in fp32.
    """
    first = weight.to(torch.bfloat16)
    return torch.cat([first, (weight - first).to(torch.bfloat16), first])


def _sum_of_halves(parts: torch.Tensor) -> torch.Tensor:
    rank = parts.shape[1] // 2
    return parts[:, :rank] + parts[:, rank:]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


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
        left = factors.rows(_rows(x))
        remade.keep(ctx, x, left)
        ctx.factors = factors
        return torch.addmm(_rows(y), left, factors.b).view(y.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_y,) = grads
        x, left = remade.kept(ctx)
        right, d_a, d_b = ctx.factors.backward(_rows(d_y), _rows(x), left)
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
        known: Known,
    ) -> torch.Tensor:
        rows = _rows(x)
        left = factors.rows(rows)
        remade.keep(ctx, x, left, weight)
        ctx.factors = factors
        if known is not None:
            return known()
        y = F.linear(rows, weight, bias).addmm_(left, factors.b)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, left, weight = remade.kept(ctx)
        return _backward_beside(ctx, grads[0], x, left, lambda: weight)


class _AdaptedPacked(torch.autograd.Function):
    """The same, where W is in 4 bits of bitsandbytes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        factors: _Factors,
        known: Known,
    ) -> torch.Tensor:
        import bitsandbytes  # optional

        rows = _rows(x)
        left = factors.rows(rows)
        remade.keep(ctx, x, left)
        ctx.factors, ctx.state = factors, weight.quant_state  # frozen
        with torch._C.DisableTorchFunctionSubclass():
            ctx.codes = weight.detach().view(-1, 1)
        if known is not None:
            return known()
        with torch._C.DisableTorchFunctionSubclass():  # each step of a Params4bit would take one
            # Before 0.50 it took codes in one row.
            y = bitsandbytes.matmul_4bit(rows, ctx.codes.t(), ctx.state, bias=bias)  # type: ignore[attr-defined]
            y.addmm_(left, factors.b)
        unflattened: torch.Tensor = y.view(*x.shape[:-1], y.shape[-1])
        return unflattened

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from bitsandbytes.functional import dequantize_4bit  # optional

        x, left = remade.kept(ctx)
        return _backward_beside(
            ctx, grads[0], x, left, lambda: dequantize_4bit(ctx.codes, ctx.state)
        )


def _backward_beside(
    ctx: Any,
    d_y: torch.Tensor,
    x: torch.Tensor,
    left: torch.Tensor,
    weight: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Of a frozen weight with an adapter beside it."""
    d_rows = _rows(d_y)
    right, d_a, d_b = ctx.factors.backward(d_rows, _rows(x), left)
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = (d_rows @ weight()).addmm_(right, ctx.factors.a).view(x.shape)
    return d_x, None, None, d_a, d_b, None, None
