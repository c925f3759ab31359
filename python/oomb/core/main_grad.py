"""Sums of parameter gradients over the chunks of one call."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from oomb.core.host_sums import HostSums
from oomb.core.rounded_sums import (
    add_rounded,
    add_rows_rounded,
    pieces_of,
    product,
    seed_of_addition,
    seed_of_parameter,
    sum_dtype,
)
from oomb.errors import UnsupportedModelError
from oomb.held_signals import with_signals_held
from oomb.model import products
from oomb.model.embedding import sum_by_row
from oomb.model.linear import can_sum_product
from oomb.model.swap import Swaps
from oomb.neighbours import neighbours_within
from oomb.parallel.placement import Placement
from oomb.parallel.sums import gradient_dtype
from oomb.parallel.weights import Weights

_SCATTERED_BYTES = 256 * 2**20  # of weights whose sums are there as a whole and in parts


def check_sums(parameters: Iterable[nn.Parameter], main_grad_dtype: str) -> None:
    """Refuse sums in bf16 where no parameter would have one.

    Raises:
        ValueError: parameters are trained, and none of them is in bf16.
    """
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    if main_grad_dtype == "bfloat16" and dtypes and torch.bfloat16 not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            "main_grad_dtype: expected 'float32' for a model that trains no parameter in bfloat16 "
            f"(these are in {names}, whose sums stay in float32 or wider), got 'bfloat16'"
        )


class MainGrads:
    """Adds each chunk's gradient to a sum of :func:`sum_dtype`.

    A thousand bf16 additions to nearest would lose what the chunks bring; sums in bf16 are rounded
    stochastically (:mod:`oomb.core.rounded_sums`). ``param.grad`` is set aside while a call runs
    and comes back unchanged if it fails.

    Args:
        main_grad_dtype: as in :class:`oomb.Config`.
        host: has the sums of some parameters in host memory.
    """

    def __init__(self, main_grad_dtype: str = "float32", host: HostSums | None = None) -> None:
        self._dtype = main_grad_dtype
        self._host = host
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._seeds: dict[nn.Parameter, int] = {}
        self._additions: dict[nn.Parameter, int] = {}  # rounded ones, in this call
        self._shards: dict[nn.Parameter, torch.Tensor] = {}  # of sums that ranks have parts of
        self._met: set[nn.Parameter] = set()  # those that something reached before they were
        self._early: set[nn.Parameter] = set()  # whose sums over ranks are there, or under way
        # Of users' parameters whose shards of sums are on the host: what ran in their place.
        self._plain: dict[nn.Parameter, tuple[nn.Parameter, Weights]] = {}
        self._left: list[Any] | None = None  # parameters that commit() has still to reach
        self._keep = self._zeros = False

    def collecting(self, parameters: list[nn.Parameter], seed: int = 0) -> Swaps:
        """While active, what backward leaves on the parameters is added to the sums.

        Args:
            seed: of the call, for sums that are rounded stochastically.
        """
        return Swaps(partial(self._begin, parameters, seed))

    def _begin(self, parameters: list[nn.Parameter], seed: int, swaps: Swaps) -> None:
        self.clear()
        _refuse_foreign_hooks(parameters)
        _expect_room_for_gradients(parameters)
        self._additions = {}
        self._seeds = {
            parameter: seed_of_parameter(seed, place)
            for place, parameter in enumerate(parameters)
            if sum_dtype(parameter, self._dtype) == torch.bfloat16
        }
        if self._host is not None:
            swaps.afterwards(self._host.end)
            self._host.begin()
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
        assert parameter not in self._early
        grad, parameter.grad = parameter.grad, None
        if grad is None:  # a linear layer has added it to the sum itself
            return
        if grad.layout != torch.strided:
            raise UnsupportedModelError(
                "sparse parameter gradients are not supported; use sparse=False"
            )
        total = self.get(parameter)
        if total is None and self._host is not None and self._host.has_whole(parameter):
            self._host.new(parameter).copy_(grad)
        elif total is None:
            dtype = sum_dtype(parameter, self._dtype)
            # Rounded additions, and sums over ranks, go through it as it lies in memory.
            self._sums[parameter] = grad.to(dtype).contiguous()
        elif total.dtype == torch.bfloat16:
            self._add_rounded(total, grad, self._next_seed(parameter))
        else:
            total.add_(grad)

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether :meth:`add_product` can serve a weight."""
        return can_sum_product(weight)

    def add_product(
        self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor, first: int = 0
    ) -> None:
        """``sum += left.T @ right``, not rounded in between; see :mod:`oomb.model.linear`.

        Args:
            left: [rows, out], the gradient of a linear layer's output.
            right: [rows, in], its input.
            first: row of the sum to which ``left``'s first column belongs.
        """
        total = self._sum_of(parameter)[first : first + left.shape[1]]
        if total.dtype == torch.bfloat16:
            for begin, end in pieces_of(total):
                addend = product(left[:, begin:end], right)
                self._add_rounded(total[begin:end], addend, self._next_seed(parameter))
        elif total.dtype == left.dtype:
            products.add_product(total, left, right)
        else:
            torch.ops.aten.addmm.dtype_out(total, left.t(), right, total.dtype, out=total)

    def add_rows(self, parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor) -> None:
        """``sum[rows] += values``, added up in the sum's precision and in a fixed order.

        Args:
            rows: [n] int64; a row may come several times.
            values: [n, width].
        """
        total = self._sum_of(parameter)
        if total.dtype == torch.bfloat16:
            add_rows_rounded(total, rows, values, self._next_seed(parameter))
            return
        # Each row is then added once, so that atomic additions have no order to differ in.
        total.index_add_(0, *sum_by_row(rows, values.to(total.dtype)))

    def _sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's sum so far; zeros at first."""
        assert parameter not in self._early
        total = self.get(parameter)
        if total is None and self._host is not None and self._host.has_whole(parameter):
            return self._host.new(parameter).zero_()
        if total is None:
            dtype = sum_dtype(parameter, self._dtype)
            total = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self._sums[parameter] = total
        return total

    def _add_rounded(self, total: torch.Tensor, addend: torch.Tensor, seed: int) -> None:
        """Apart from its callers, because a trace counts it instead: it is no torch operation."""
        add_rounded(total, addend, seed)

    def _next_seed(self, parameter: nn.Parameter) -> int:
        """Of the parameter's next rounded addition; each addition has noise of its own."""
        addition = self._additions.get(parameter, 0)
        self._additions[parameter] = addition + 1
        return seed_of_addition(self._seeds[parameter], addition)

    def sum_over(
        self, placement: Placement, weights: Weights, parameters: list[nn.Parameter]
    ) -> None:
        """Replace the sums by those over all ranks, which meet a parameter if one of them does.

        Those of weights that the ranks have shards of become shards, of the users' parameters.

        Args:
            parameters: the users'.
        """
        if placement.ranks == 1:
            return
        placement.finish_sums()
        plain = weights.plain(parameters)
        met = placement.collect(lambda: list(map(self._is_met, plain)))
        pairs = zip(plain, parameters, map(any, zip(*met, strict=True)), strict=True)
        reached = [(p, owner) for p, owner, is_reached in pairs if is_reached]
        whole = [p for p, _ in reached if not weights.is_shard(p)]
        shards = [(p, owner) for p, owner in reached if weights.is_shard(p)]
        here = [p for p in whole if self._host is None or p not in self._host]
        here = [p for p in here if p not in self._early]
        placement.sum_([self._sum_of(p) for p in here])
        if self._host is not None:
            self._host.resume()
            self._sum_on_host(placement, self._host, whole)
        self.scatter(weights, [p for p, _ in shards if self._shard_of(p) is None])
        if self._host is not None:
            self._host.end()
        for p, owner in shards:
            if self._host is not None and self._host.has_shard(p):
                self._plain[owner] = p, weights
            else:
                self._sums[owner] = weights.shard_like(p, self._shards.pop(p))

    def has_sums(self, parameters: list[nn.Parameter]) -> list[bool]:
        """Which of them have a whole sum on the device."""
        return [p in self._sums for p in parameters]

    def sum_early(self, placement: Placement, parameters: list[nn.Parameter]) -> None:
        """Begin what :meth:`sum_over` does of parameters that nothing reaches any more.

        Args:
            parameters: that :meth:`has_sums` holds of, on all ranks.
        """
        placement.sum_beside([self._sums[p] for p in parameters])
        self._early.update(parameters)

    def _is_met(self, parameter: nn.Parameter) -> bool:
        on_host = self._host is not None and self._host.has(parameter)
        return on_host or parameter in self._sums or parameter in self._met

    def _sum_on_host(
        self, placement: Placement, host: HostSums, parameters: list[nn.Parameter]
    ) -> None:
        """A layer's sums come to the device, are exchanged, and go, while the next layer's come."""
        for own in host.by_layer(parameters):
            placement.sum_([self._sum_of(p) for p in own])

    def scatter(self, weights: Weights, parameters: list[nn.Parameter]) -> None:
        """Add sums over all ranks to this rank's shards, and begin new sums.

        Args:
            parameters: the same on all ranks, as they are in a call.
        """
        for same in neighbours_within(_SCATTERED_BYTES, parameters, lambda p: p.nbytes):
            self._met.update(p for p in same if p in self._sums)
            parts = weights.scatter(same, [self._sum_of(p) for p in same])
            for parameter, part in zip(same, parts, strict=True):
                dtype = self._sums.pop(parameter).dtype
                total = self._shard_of(parameter)
                if dtype == torch.bfloat16:
                    if total is None:
                        total = self._new_shard(parameter, torch.zeros_like(part, dtype=dtype))
                    self._add_rounded(total, part, self._next_seed(parameter))
                elif total is None:
                    self._new_shard(parameter, part)
                else:
                    total.add_(part)

    def _shard_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's shard of a sum over all ranks so far."""
        if self._host is not None and self._host.has_shard(parameter):
            return self._host.of(parameter)
        return self._shards.get(parameter)

    def _new_shard(self, parameter: nn.Parameter, first: torch.Tensor) -> torch.Tensor:
        """Begin a shard of a sum with what is there first."""
        if self._host is not None and self._host.has_shard(parameter):
            return self._host.new(parameter).copy_(first)
        self._shards[parameter] = first
        return first

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
            self._drop()
            return False
        while self._left:
            parameter = self._left[-1]
            total = self.get(parameter)
            on_host = self._host is not None and parameter in self._host
            if total is not None and on_host:  # its memory is for the next call's sums
                total = total.to(parameter.device, copy=True)
            on_host = on_host or parameter in self._plain
            dtype = gradient_dtype(parameter)
            addend = None if total is None else total.to(dtype)
            if addend is not None and addend is total and self._keep and not on_host:
                addend = addend.clone()
            elif addend is None and self._zeros and parameter.grad is None:
                addend = torch.zeros_like(parameter, dtype=dtype)
            # Done and noted as done in one line: an interrupt comes before or after.
            if addend is None:
                self._left.pop()
            elif parameter.grad is None:
                self._left.pop().grad = addend
            else:
                self._left.pop().grad.add_(addend)
            if not self._keep:
                self._sums.pop(parameter, None)
                if self._host is not None:
                    self._host.forget(self._plain.pop(parameter, (parameter,))[0])
        return True

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum so far, or the one kept from the last call."""
        if self._host is not None and self._host.has_whole(parameter):
            return self._host.of(parameter)
        if parameter not in self._plain:
            return self._sums.get(parameter)
        plain, weights = self._plain[parameter]
        shard = self._shard_of(plain)
        assert shard is not None
        return weights.shard_like(plain, shard.to(parameter.device, copy=True))

    def clear(self) -> None:
        self._drop()
        self._left = None

    def _drop(self) -> None:
        self._sums, self._shards, self._met, self._early = {}, {}, set(), set()
        self._plain = {}
        if self._host is not None:
            self._host.drop()


def _refuse_foreign_hooks(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                "a parameter has a post-accumulate-grad hook (an optimizer fused into backward?); "
                "it would see the gradient of one chunk; remove it"
            )


def _expect_room_for_gradients(parameters: list[nn.Parameter]) -> None:
    """Check that sums can be added to the gradients that are there.

    Raises:
        ValueError: they cannot, which otherwise showed when half of them have been.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            got = f"a tensor of layout {grad.layout}"
        elif grad.is_inference():
            got = "a tensor made in inference mode"
        elif grad.requires_grad:
            got = "a tensor that requires gradients"
        elif any(step == 0 and n > 1 for step, n in zip(grad.stride(), grad.shape, strict=True)):
            got = f"an expanded view, strides {list(grad.stride())}"
        else:
            continue
        raise ValueError(
            f"param.grad of a parameter {list(parameter.shape)}: expected a tensor that gradients "
            f"can be added to, got {got}; set it to None"
        )
