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

_OWN = (None, nn.Linear.forward)  # a layer's forward that nobody has replaced
TakesSum = Callable[[torch.Tensor], bool]
Rows = tuple[int, int]  # of a weight: first and last + 1
Known = Callable[[], torch.Tensor] | None
"""Gives what a product would; None: it is computed."""


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
        known: Known,
    ) -> torch.Tensor:
        remade.keep(ctx, x, weight)
        ctx.weight, ctx.sums, ctx.rows = weight, sums, rows
        y = known() if known is not None else products.linear(x, weight[slice(*rows)], bias)
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
        return d_x, None, d_bias, None, None, None


class _FrozenLinear(torch.autograd.Function):
    """The product with a weight that does not train, with autograd's own bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        known: Known,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        y = known() if known is not None else F.linear(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight, None, None, None


class _SummedForward:
    """A linear layer's forward whose weight gradient goes to its sum."""

    def __init__(self, module: nn.Linear, sums: WeightSums) -> None:
        self._module, self._sums, self._plain = module, sums, module.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return self._plain(x)
        return self.of_rows(x, (0, self._module.weight.shape[0]))

    def known(self, x: torch.Tensor, known: Known) -> torch.Tensor:
        """All outputs, with autograd."""
        apply: Callable[..., torch.Tensor] = _SummedLinear.apply
        weight = self._module.weight
        return apply(x, weight, self._module.bias, self._sums, (0, weight.shape[0]), known)

    def of_rows(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The outputs of some rows of the weight."""
        weight, bias = self._module.weight, _bias(self._module, rows)
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight[slice(*rows)], bias)
        if not torch.is_grad_enabled():
            return products.linear(x, weight[slice(*rows)], bias)
        apply: Callable[..., torch.Tensor] = _SummedLinear.apply
        return apply(x, weight, bias, self._sums, rows, None)


def summed_forwards(
    causal: nn.Module, sums: WeightSums
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A forward for each plain linear layer that trains and whose sum can be taken so."""
    linears = [module for module in causal.modules() if isinstance(module, nn.Linear)]
    return {module: _SummedForward(module, sums) for module in linears if _fits(module, sums)}


def known_forward(module: nn.Linear) -> Callable[[torch.Tensor, Known], torch.Tensor] | None:
    """Forward, with autograd, of a layer whose product may be known; it runs as it would without.

    None: the call runs the layer in another way.

    Args:
        module: of which :func:`may_be_known` holds, inside a call.
    """
    return _known_of(module, vars(module).get("forward"))


def _known_of(
    module: nn.Linear, forward: object
) -> Callable[[torch.Tensor, Known], torch.Tensor] | None:
    if isinstance(forward, _SummedForward):
        return forward.known
    if isinstance(forward, DividedForward):
        return forward.known_forward()
    if module.weight.requires_grad or getattr(forward, "__func__", None) not in _OWN:
        return None
    frozen: Callable[..., torch.Tensor] = _FrozenLinear.apply
    return lambda x, known: frozen(x, module.weight, module.bias, known)


def may_be_known(module: nn.Linear, takes: TakesSum) -> bool:
    """Whether nothing but weight and bias makes a layer's outputs, and backward can do without.

    Args:
        takes: as of :class:`WeightSums`.
    """
    if not runs_as_is(module) or "forward" in vars(module):
        return False
    weight, bias = module.weight, module.bias
    if weight.requires_grad:
        return not weight._backward_hooks and takes(weight)
    return bias is None or not bias.requires_grad


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

    def known_forward(self) -> Callable[[torch.Tensor, Known], torch.Tensor] | None:
        """As :func:`known_forward`, of all rows."""
        whole = _known_of(self._module, self._whole)
        if whole is None:
            return None
        return lambda x, known: self(x) if self._rows is not None else whole(x, known)


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
