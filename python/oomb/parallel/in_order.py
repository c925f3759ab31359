"""Parts of ranks, added in the order of ranks: the same bits wherever it is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def added_in_order(parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The sum of a part of each rank, [ranks, …] or a sequence of them, as of :func:`sum_dtype`."""
    wide = sum_dtype(parts[0].dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are added in: fp32 for those of 16 bits, else their own."""
    return torch.float32 if dtype.itemsize == 2 else dtype
