"""The Triton kernels of :mod:`oomb.model.float8`; CPU builds of torch come without Triton."""

from typing import Any

import torch
import triton
import triton.language as tl

_ROW_BLOCK = 4096
_TILE = 64


@triton.jit
def _power_of_two(highest):  # type: ignore[no-untyped-def]
    """The largest power of two that takes ``highest`` to 448 at most, and its inverse."""
    bits = tl.maximum(highest, 1e-12).to(tl.int32, bitcast=True)
    # 448 = 1.75 · 2**8: a mantissa above 1.75 (0x600000) costs one power more.
    power = 8 - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.maximum(tl.minimum(power, 126), -126)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _codes(x, scale):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.minimum(x * scale, 448.0), -448.0).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(x, codes, scales, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row: its largest value, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    line = x + row * width
    highest = tl.zeros([block], tl.float32)
    spoilt = tl.zeros([block], tl.float32)
    for begin in range(0, width, block):
        at = begin + tl.arange(0, block)
        value = tl.load(line + at, mask=at < width, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(value))
        spoilt += value * 0.0  # NaN where a value is not finite
    scale, inverse = _power_of_two(tl.max(highest, axis=0))
    tl.store(scales + row, inverse + tl.sum(spoilt, axis=0))
    for begin in range(0, width, block):
        at = begin + tl.arange(0, block)
        value = tl.load(line + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(codes + row * width + at, _codes(value, scale), mask=at < width)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(x, highest, codes, scales, rows, width, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per tile, which it turns; those of the first rows write their columns' scales."""
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    most = tl.load(highest).to(tl.float32)
    scale, inverse = _power_of_two(most)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    value = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    turned = _codes(tl.trans(value).to(tl.float32), scale)
    inside = (column[:, None] < width) & (row[None, :] < rows)
    tl.store(codes + column[:, None] * rows + row[None, :], turned, mask=inside)
    if tl.program_id(1) == 0:
        told = tl.zeros([tile], tl.float32) + (inverse + most * 0.0)
        tl.store(scales + column, told, mask=column < width)


def launch_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """See :func:`oomb.model.float8.rows_in_float8`; x is contiguous."""
    rows, width = x.shape
    if rows:
        block = min(_ROW_BLOCK, triton.next_power_of_2(width))
        kernel: Any = _rows[(rows,)]
        with torch.cuda.device(x.device):
            kernel(x, codes, scales, width, block, num_warps=8)


def launch_columns(
    x: torch.Tensor, highest: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """See :func:`oomb.model.float8.columns_in_float8`; x is contiguous."""
    rows, width = x.shape
    kernel: Any = _columns[(triton.cdiv(width, _TILE), triton.cdiv(rows, _TILE))]
    with torch.cuda.device(x.device):
        kernel(x, highest, codes, scales, rows, width, _TILE, num_warps=4)
