"""Sums of parameter gradients over the chunks of one call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from oomb.errors import UnsupportedModelError
from oomb.held_signals import with_signals_held
from oomb.model.embedding import sum_by_row
from oomb.model.linear import can_sum_product
from oomb.model.swap import Swaps


class MainGrads:
    """Adds each chunk's gradient to a buffer in fp32 (fp64 for fp64 parameters).

    A thousand bf16 additions would lose what the chunks bring. ``param.grad`` is set aside while a
    call runs and comes back unchanged if it fails.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._left: list[Any] | None = None  # parameters that commit() has still to reach
        self._keep = self._zeros = False

    def collecting(self, parameters: list[nn.Parameter]) -> Swaps:
        """While active, what backward leaves on the parameters is added to the sums."""
        return Swaps(partial(self._begin, parameters))

    def _begin(self, parameters: list[nn.Parameter], swaps: Swaps) -> None:
        self.clear()
        _refuse_foreign_hooks(parameters)
        for parameter in parameters:
            swaps.afterwards(partial(self._let_go, parameter, parameter.grad))
        for parameter in parameters:
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _let_go(self, parameter: Any, grad: torch.Tensor | None) -> None:
        parameter.grad = grad
        hooks = parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if hook == self._collect]:
            del hooks[key]

    def _collect(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        grad, parameter.grad = parameter.grad, None
        if grad is None:  # a linear layer has added it to the sum itself
            return
        if grad.layout != torch.strided:
            raise UnsupportedModelError(
                "sparse parameter gradients are not supported; use sparse=False"
            )
        if parameter in self._sums:
            self._sums[parameter].add_(grad)
        else:
            dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
            self._sums[parameter] = grad.to(dtype)

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether :meth:`add_product` can serve a weight."""
        return can_sum_product(weight)

    def add_product(self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor) -> None:
        """``sum += left.T @ right``, not rounded in between; see :mod:`oomb.model.linear`.

        Args:
            left: [rows, out], the gradient of a linear layer's output.
            right: [rows, in], its input.
        """
        total = self._sum_of(parameter)
        if total.dtype == left.dtype:
            total.addmm_(left.t(), right)
        else:
            torch.ops.aten.addmm.dtype_out(total, left.t(), right, total.dtype, out=total)

    def add_rows(self, parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor) -> None:
        """``sum[rows] += values``, added up in the sum's precision and in a fixed order.

        Args:
            rows: [n] int64; a row may come several times.
            values: [n, width].
        """
        total = self._sum_of(parameter)
        # Each row is then added once, so that atomic additions have no order to differ in.
        total.index_add_(0, *sum_by_row(rows, values.to(total.dtype)))

    def _sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's sum so far; zeros at first."""
        total = self._sums.get(parameter)
        if total is None:
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            total = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self._sums[parameter] = total
        return total

    def commit(self, parameters: list[nn.Parameter], keep: bool, zeros: bool) -> None:
        """``param.grad += sum.to(param.dtype)`` once per parameter; frees its sum unless kept.

        Args:
            zeros: give parameters that nothing reached a zero gradient (an empty draw of chunks).
        """
        self._keep, self._zeros, self._left = keep, zeros, list(parameters)
        with_signals_held(self.settle)

    def settle(self) -> bool:
        """End the call: what :meth:`commit` has begun is done, all else is dropped.

        Returns:
            Whether all parameters have their gradients; else all are as they were.
        """
        if self._left is None:
            self._sums = {}
            return False
        while self._left:
            parameter = self._left[-1]
            total = self._sums.get(parameter)
            addend = None if total is None else total.to(parameter.dtype)
            if addend is not None and addend is total and self._keep:
                addend = addend.clone()
            elif addend is None and self._zeros and parameter.grad is None:
                addend = torch.zeros_like(parameter)
            # Done and noted as done in one line: an interrupt comes before or after.
            if addend is None:
                self._left.pop()
            elif parameter.grad is None:
                self._left.pop().grad = addend
            else:
                self._left.pop().grad.add_(addend)
            if not self._keep:
                self._sums.pop(parameter, None)
        return True

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum kept from the last call."""
        return self._sums.get(parameter)

    def clear(self) -> None:
        self._sums, self._left = {}, None


def _refuse_foreign_hooks(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                "a parameter has a post-accumulate-grad hook (an optimizer fused into backward?); "
                "it would see the gradient of one chunk; remove it"
            )
