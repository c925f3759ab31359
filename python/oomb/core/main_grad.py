"""Sums of parameter gradients over the chunks of one call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from oomb.errors import UnsupportedModelError
from oomb.model.embedding import sum_by_row
from oomb.model.linear import can_sum_product


class MainGrads:
    """Adds each chunk's gradient to a buffer in fp32 (fp64 for fp64 parameters).

    A thousand bf16 additions would lose what the chunks bring. ``param.grad`` is set aside while a
    call runs and comes back unchanged if it fails.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    @contextmanager
    def collecting(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Collect what backward leaves on the parameters; on success add it to ``param.grad``."""
        self._sums = {}
        _refuse_foreign_hooks(parameters)
        before = {parameter: parameter.grad for parameter in parameters}
        hooks = [p.register_post_accumulate_grad_hook(self._collect) for p in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            yield
        except BaseException:
            self._sums = {}
            raise
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, grad in before.items():
                parameter.grad = grad

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
        with _interrupts_deferred():
            for parameter in parameters:
                total = self._sums.get(parameter) if keep else self._sums.pop(parameter, None)
                if total is None and not zeros:
                    continue
                if parameter.grad is not None:
                    if total is not None:
                        parameter.grad.add_(total.to(parameter.dtype))
                elif total is not None:
                    grad = total.to(parameter.dtype)
                    parameter.grad = grad.clone() if keep and grad is total else grad
                else:
                    parameter.grad = torch.zeros_like(parameter)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum kept from the last call."""
        return self._sums.get(parameter)

    def clear(self) -> None:
        self._sums = {}


def _refuse_foreign_hooks(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                "a parameter has a post-accumulate-grad hook (an optimizer fused into backward?); "
                "it would see the gradient of one chunk; remove it"
            )


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back while gradients are written: all of them or none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)
