"""Gradient pages that one could build, emulated in torch for bench/gradient_accumulation.py."""

from __future__ import annotations

import torch
from torch import Tensor


def drop_bits(x: Tensor, count: int, stochastic: bool) -> Tensor:
    """The bits of fp32 ``x`` rounded to a multiple of 2**count, to nearest even or at random."""
    bits = x.view(torch.int32)
    if stochastic:
        bits = bits + torch.randint_like(bits, 1 << count)
    else:
        bits = bits + (1 << (count - 1)) - 1 + ((bits >> count) & 1)
    return (bits >> count) << count


class OnePlane:
    """bf16 pages, rounded to nearest."""

    bytes_per_element = 2

    def __init__(self, like: Tensor) -> None:
        self._sum = torch.zeros_like(like, dtype=torch.bfloat16)

    def add(self, contribution: Tensor) -> None:
        self._sum = (self._sum.float() + contribution).to(torch.bfloat16)

    def read(self) -> Tensor:
        return self._sum.double()


class TwoPlanes:
    """24 bits: the upper 16 of fp32 (read alone: bf16) in one plane, the next 8 in another."""

    bytes_per_element = 3

    def __init__(self, like: Tensor, stochastic: bool) -> None:
        self._stochastic = stochastic
        self._high = torch.zeros_like(like, dtype=torch.int16)
        self._low = torch.zeros_like(like, dtype=torch.uint8)

    def add(self, contribution: Tensor) -> None:
        bits = drop_bits(self._joined() + contribution, 8, self._stochastic)
        self._high = (bits >> 16).to(torch.int16)
        self._low = ((bits >> 8) & 0xFF).to(torch.uint8)

    def read(self) -> Tensor:
        return self._joined().double()

    def _joined(self) -> Tensor:
        return ((self._high.int() << 16) | (self._low.int() << 8)).view(torch.float32)
