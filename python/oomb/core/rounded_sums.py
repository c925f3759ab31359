"""Additions to sums in bf16 that round stochastically, so that small addends count on average.

To nearest, an addend below 1/512 of a sum would be lost each time. Rounded up with a probability
that is its share of the step between neighbours, the sum is right in expectation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from oomb import _C
from oomb.model.embedding import sum_by_row
from oomb.ops.launch import stream_of

_PIECE_BYTES = 2**28  # of a product in fp32 that exists beside its sum
# Pieces begin at multiples of so many rows: from an address that is not aligned to 16 bytes, a
# matrix product takes two to three times as long.
_PIECE_ROWS = 128


def sum_dtype(parameter: torch.Tensor, main_grad_dtype: str) -> torch.dtype:
    """Of the sum of a parameter's gradients: at least the parameter's precision.

    Args:
        main_grad_dtype: as in :class:`oomb.Config`. ``"bfloat16"`` is for bf16 parameters alone;
            their gradient ends in bf16 anyway.
    """
    if parameter.dtype == torch.float64:
        return torch.float64
    if parameter.dtype == torch.bfloat16 and main_grad_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def seed_of_parameter(call_seed: int, place: int) -> int:
    """Of the parameter at ``place`` among those that train; 64 bits."""
    key = f"oomb sum {call_seed} {place}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def seed_of_addition(parameter_seed: int, addition: int) -> int:
    """Of a parameter's addition number ``addition`` in a call."""
    mixed = (parameter_seed + (addition + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def add_rounded(total: torch.Tensor, addend: torch.Tensor, seed: int) -> None:
    """``total += addend``.

    Args:
        total: bf16, contiguous.
        addend: fp32 or bf16, of the same shape.
        seed: of the noise, which depends on it and the element's place alone.
    """
    _C.rounded_add(
        sum=total.view(-1),
        addend=addend.contiguous().view(-1),
        seed=seed,
        stream=stream_of(total.device),
    )


def pieces_of(total: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of pieces of like size, some 256 MiB of product in fp32."""
    rows = total.shape[0]
    number = max(1, -(-4 * total.numel() // _PIECE_BYTES))
    step = max(1, -(-rows // (number * _PIECE_ROWS))) * _PIECE_ROWS
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left.T @ right`` in fp32: not rounded in between where the device has such a product."""
    if left.dtype == torch.float32 or not left.is_cuda:
        return left.t().float() @ right.float()
    wide: torch.Tensor = torch.ops.aten.mm.dtype(left.t(), right, torch.float32)
    return wide


def add_rows_rounded(
    total: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, seed: int
) -> None:
    """``total[rows] += values``; values of equal rows are first added up in fp32.

    Args:
        total: [rows of the sum, width] bf16.
        rows: [n] int64; a row may come several times.
        values: [n, width].
        seed: as of :func:`add_rounded`.
    """
    distinct, added = sum_by_row(rows, values.float())
    sums = total[distinct]
    add_rounded(sums, added, seed)
    # Behind the distinct rows sum_by_row pads with row 0. There the first row is written again with
    # the same values, so that it does not matter who writes last.
    padding = distinct == 0
    padding[0] = False
    total.index_copy_(
        0,
        torch.where(padding, distinct[0], distinct),
        torch.where(padding[:, None], sums[0], sums),
    )
