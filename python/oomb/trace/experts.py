"""Grouped products of mixtures of experts: torch counts none, and knows shapes in bf16 only."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import moe

from oomb.model.swap import Swaps, swapping

# FLOP per row, column of the rows and column of the result; the last two are transformers' own.
PRODUCTS = {
    "aten::_grouped_mm": 2,
    "transformers::grouped_mm_fallback": 2,
    "transformers::grouped_mm_fallback_backward": 4,
}


@swapping
def experts_of_any_dtype(swaps: Swaps) -> None:
    """Lead products that are not in bf16 to transformers' own operation, which tells its shapes."""
    module: Any = moe
    usual = module._can_use_grouped_mm

    def known(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and bool(usual(rows, weight, offs))

    swaps.replace(module, "_can_use_grouped_mm", known)


def product_flops(name: str, rows: torch.Tensor, weight: torch.Tensor) -> int:
    """FLOP of an operation of ``PRODUCTS`` on [rows, in] and [experts, in, out] or [in, out]."""
    return PRODUCTS[name] * rows.numel() * weight.shape[-1]
