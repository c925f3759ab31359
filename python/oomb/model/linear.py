"""Linear layers whose weight gradient is added to its sum inside the matrix product.

A chunk's weight gradient would otherwise be written in the weight's dtype, read back and added to
the sum in fp32: for a 7B model 70 GB of traffic per chunk, and a rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from oomb.model import products


class WeightSums(Protocol):
    """Where sums of weight gradients live."""

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether ``add_product`` can serve this weight."""

    def add_product(self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor) -> None:
        """``sum of parameter += left.T @ right``; left [rows, out], right [rows, in]."""

    def add_rows(self, parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor) -> None:
        """``sum of parameter[rows] += values``; rows [n] int64, values [n, width]."""


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        sums: WeightSums,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.sums = weight, sums
        y = products.linear(x, weight, bias)
        # A view could not be changed in place by the model, as what a linear layer gives can.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_y = grads[0]
        rows = d_y.reshape(-1, d_y.shape[-1])
        ctx.sums.add_product(ctx.weight, rows, x.reshape(-1, x.shape[-1]))
        d_x = products.input_gradient(d_y, weight) if ctx.needs_input_grad[0] else None
        d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return d_x, None, d_bias, None


def summed_forwards(
    causal: nn.Module, sums: WeightSums
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A forward for each plain linear layer that trains and whose sum can be taken so."""

    def summed(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled(x.device.type):
                return plain(x)
            if not torch.is_grad_enabled():
                return products.linear(x, module.weight, module.bias)
            apply: Callable[..., torch.Tensor] = _SummedLinear.apply
            return apply(x, module.weight, module.bias, sums)

        return forward

    linears = [module for module in causal.modules() if isinstance(module, nn.Linear)]
    return {module: summed(module) for module in linears if _fits(module, sums)}


def _fits(module: nn.Linear, sums: WeightSums) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    return (
        weight.requires_grad
        and not weight._backward_hooks  # somebody watches or changes this gradient
        and sums.takes(weight)
    )


def can_sum_product(weight: torch.Tensor) -> bool:
    """Whether a product of tensors like this can be added to a sum in fp32 (fp64) in one go."""
    if type(weight) is not nn.Parameter:
        return False
    if weight.dtype in (torch.float32, torch.float64):
        return True
    return weight.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out")  # torch >= 2.8
