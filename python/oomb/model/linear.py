"""Linear layers whose weight gradient is added to its sum inside the matrix product.

A chunk's weight gradient would otherwise be written in the weight's dtype, read back and added to
the sum in fp32: for a 7B model 70 GB of traffic per chunk, and a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from oomb.model import products, remade

Rows = tuple[int, int]  # of a weight: first and last + 1


class WeightSums(Protocol):
    """Where sums of weight gradients live."""

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether ``add_product`` can serve this weight."""

    def add_product(
        self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor, first: int = 0
    ) -> None:
        """``sum of parameter += left.T @ right``; left [rows, out], right [rows, in].

        Args:
            first: row of the sum to which ``left``'s first column belongs.
        """

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
        rows: Rows,
    ) -> torch.Tensor:
        remade.keep(ctx, x, weight)
        ctx.weight, ctx.sums, ctx.rows = weight, sums, rows
        y = products.linear(x, weight[slice(*rows)], bias)
        # A view could not be changed in place by the model, as what a linear layer gives can.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = remade.kept(ctx)
        d_y = grads[0]
        rows = d_y.reshape(-1, d_y.shape[-1])
        ctx.sums.add_product(ctx.weight, rows, x.reshape(-1, x.shape[-1]), ctx.rows[0])
        del x  # which may be there for this alone
        part = weight[slice(*ctx.rows)]
        d_x = products.input_gradient(d_y, part) if ctx.needs_input_grad[0] else None
        d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return d_x, None, d_bias, None, None


class _SummedForward:
    """A linear layer's forward whose weight gradient goes to its sum."""

    def __init__(self, module: nn.Linear, sums: WeightSums) -> None:
        self._module, self._sums, self._plain = module, sums, module.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return self._plain(x)
        return self.of_rows(x, (0, self._module.weight.shape[0]))

    def of_rows(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The outputs of some rows of the weight."""
        weight, bias = self._module.weight, _bias(self._module, rows)
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight[slice(*rows)], bias)
        if not torch.is_grad_enabled():
            return products.linear(x, weight[slice(*rows)], bias)
        apply: Callable[..., torch.Tensor] = _SummedLinear.apply
        return apply(x, weight, bias, self._sums, rows)


def summed_forwards(
    causal: nn.Module, sums: WeightSums
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A forward for each plain linear layer that trains and whose sum can be taken so."""
    linears = [module for module in causal.modules() if isinstance(module, nn.Linear)]
    return {module: _SummedForward(module, sums) for module in linears if _fits(module, sums)}


def _fits(module: nn.Linear, sums: WeightSums) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return takes_product(module.weight, sums)


def takes_product(weight: torch.Tensor, sums: WeightSums) -> bool:
    """Whether a weight's gradient can go to its sum as a product."""
    return (
        weight.requires_grad
        and not weight._backward_hooks  # somebody watches or changes this gradient
        and sums.takes(weight)
    )


def runs_as_is(module: nn.Module) -> bool:
    """Whether weight and bias make a linear layer's outputs, and nobody watches or changes them."""
    if type(module) is not nn.Linear or not _is_plain(module.weight):
        return False
    return not is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody sees or changes what goes through a linear layer, by a hook or a forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    forward = vars(module).get("forward")
    return any(hooks) or not (forward is None or isinstance(forward, _SummedForward))


class DividedForward:
    """A linear layer's forward that gives the outputs of some rows alone, inside :meth:`only`."""

    def __init__(self, module: nn.Linear) -> None:
        self._module, self._whole = module, module.forward
        self._rows: Rows | None = None

    @property
    def outputs(self) -> int:
        """Of all rows."""
        return self._module.weight.shape[0]

    @contextmanager
    def only(self, rows: Rows) -> Iterator[None]:
        """Inside, these rows alone."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, whole = self._rows, self._whole
        if rows is None:
            return whole(x)
        if isinstance(whole, _SummedForward):
            return whole.of_rows(x, rows)
        return F.linear(x, self._module.weight[slice(*rows)], _bias(self._module, rows))


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether rows of a weight are rows of its product. One without memory says what it stands
    for."""
    plain: bool = getattr(weight, "is_plain", type(weight) is nn.Parameter)
    return plain


def _bias(module: nn.Linear, rows: Rows) -> torch.Tensor | None:
    bias = module.bias
    return bias if bias is None or rows == (0, bias.shape[0]) else bias[slice(*rows)]


def can_sum_product(weight: torch.Tensor) -> bool:
    """Whether a product of tensors like this can be added to a sum in fp32 (fp64) in one go."""
    if type(weight) is not nn.Parameter:
        return False
    if weight.dtype in (torch.float32, torch.float64):
        return True
    return weight.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out")  # torch >= 2.8
