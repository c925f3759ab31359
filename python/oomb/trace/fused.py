"""Fused kernels on tensors without memory: they keep for backward what the real ones keep, and read
and write as much."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomb.model.adapters import Products
from oomb.model.fused import fusible_modules
from oomb.model.remade import remakable


def fused_on_shapes(decoder: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Forwards that keep for backward what the fused kernels keep."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module, kind in fusible_modules(decoder):
        forwards[module] = _norm_of(module) if kind == "norm" else _gate_of(module)
    return forwards


class ProductsOfShapes(Products):
    """Of adapters: products in fp32 of factors in 16 bits, which a CPU does not have."""

    def wide(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)

    def row_factor(self, halves: torch.Tensor, scale: float) -> torch.Tensor:
        rows, columns = halves.shape
        return halves.new_empty((rows, columns // 2 * 3), dtype=torch.bfloat16)


def _norm_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return remakable(_FusedNorm.apply, x, module.weight)

    return forward


def _gate_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        product = remakable(_FusedGate.apply, module.gate_proj(x), module.up_proj(x))
        y: torch.Tensor = module.down_proj(product)
        return y

    return forward


def rotate_on_shapes(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated: tuple[torch.Tensor, torch.Tensor] = _FusedRotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _FusedRotation(torch.autograd.Function):
    """In place, in the layout of the projections."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, cos, sin = tensors
        ctx.save_for_backward(cos, sin)
        return q.view_as(q).neg_(), k.view_as(k).neg_()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        return grads[0].neg_(), grads[1].neg_(), None, None


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rms = torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rms)
        return x.new_zeros(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return x * grads[0], weight.new_zeros(weight.shape)


class _FusedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return gate.detach().mul_(grads[0]), up.detach().neg_()  # in place of its inputs
