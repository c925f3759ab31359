"""Sums of ranks' parts: wide enough, and in the order of ranks."""

from __future__ import annotations

import pytest
import torch

from oomb.parallel.in_order import added_in_order


@pytest.mark.parametrize(
    ("dtype", "large", "wide"),
    [
        (torch.float16, 2048.0, torch.float32),  # to which adding 1 changes nothing
        (torch.bfloat16, 256.0, torch.float32),
        (torch.float32, 2.0**20, torch.float32),
        (torch.float64, 2.0**40, torch.float64),
    ],
)
def test_no_part_is_lost(dtype: torch.dtype, large: float, wide: torch.dtype) -> None:
    parts = torch.tensor([[large], [1.0], [1.0], [1.0]], dtype=dtype)
    total = added_in_order(parts)
    assert total.dtype == wide
    assert total.item() == large + 3
    assert parts[0].item() == large, "a part is left as it was"


def test_parts_are_added_in_the_order_of_ranks() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0], dtype=torch.float32)[:, None]
    assert added_in_order(parts).item() == 1.0
    assert added_in_order(parts.flip(0)).item() == 0.0
