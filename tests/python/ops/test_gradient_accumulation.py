"""Gradient pages after many chunks' adds: error bounds that follow from how sums are rounded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from paged_case import Case, Problem

from oomb.core.call_pages import seed_of_chunk

CASE = Case(
    query_heads=2, kv_heads=1, chunk=16, head_dim=32, page_size=16, num_past=48,
    dtype=torch.float32, dkv_dtype=torch.float32,
)  # fmt: skip
CHUNKS = 256
DEVIATIONS = 5.0  # of a normal variable: one run in two million goes beyond


class Chunks:
    """The same past under fresh queries and output gradients, chunk after chunk."""

    def __init__(self, common_part: float) -> None:
        self._generator = torch.Generator().manual_seed(11)
        self._means = common_part * self._random(2, 1, CASE.query_heads, 1, CASE.head_dim)
        self._contribution = Problem(CASE)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, d_o = self._means + self._random(2, 1, CASE.query_heads, CASE.chunk, CASE.head_dim)
        return q, d_o

    def contribution(self, q: torch.Tensor, d_o: torch.Tensor) -> torch.Tensor:
        """What a chunk adds, as the kernels compute it in fp32."""
        self._contribution.dkv_pool.zero_()
        return add(self._contribution, q, d_o).double()

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator)


def add(
    problem: Problem, q: torch.Tensor, d_o: torch.Tensor, rounding_seed: int = 0
) -> torch.Tensor:
    """Adds a chunk; dK and dV in the pages afterwards, [2, B, Hkv, N, D]."""
    problem.q, problem.d_o = q.to(problem.case.dtype), d_o.to(problem.case.dtype)
    problem.d_lse = torch.zeros_like(problem.d_lse)
    problem.backward(*problem.forward(), seed=rounding_seed)
    return torch.stack([problem.past_gradient(kind) for kind in range(2)])


def engine_seed(chunk: int) -> int:
    return seed_of_chunk(5, layer=1, chunk=chunk)


@dataclasses.dataclass
class Rounded:
    """bf16 sums beside exact ones, and the variance that stochastic rounding gives them.

    A value x between neighbours a < b is rounded to b with probability (x - a) / (b - a), so that
    its error has mean zero, variance (x - a)(b - x) and a fourth cumulant below (b - a)^2 times
    that. Errors of different adds are uncorrelated.
    """

    error: torch.Tensor
    exact: torch.Tensor
    variance: torch.Tensor
    fourth: torch.Tensor

    @property
    def relative(self) -> float:
        return float(self.error.norm() / self.exact.norm())

    @property
    def variance_ratio(self) -> float:
        """Measured over expected; 1 on average."""
        return float(self.error.square().sum() / self.variance.sum())

    @property
    def variance_ratio_deviation(self) -> float:
        squares = (2 * self.variance.square() + self.fourth).sum().sqrt()
        return float(squares / self.variance.sum())

    @property
    def bias(self) -> float:
        """Sum of errors away from zero, in standard deviations of such a sum."""
        return float((self.error * self.exact.sign()).sum() / self.variance.sum().sqrt())


def accumulate(common_part: float, nearest: bool = False) -> dict[int, Rounded]:
    """After 16, 64, ... chunks: the kernels' bf16 pages, or ones that round to nearest."""
    chunks = Chunks(common_part)
    problem = Problem(dataclasses.replace(CASE, dkv_dtype=torch.bfloat16))
    pages = torch.zeros(2, 1, CASE.kv_heads, CASE.num_past, CASE.head_dim, dtype=torch.float64)
    exact, variance, fourth = (torch.zeros_like(pages) for _ in range(3))
    results = {}
    for chunk in range(CHUNKS):
        q, d_o = chunks.draw()
        contribution = chunks.contribution(q, d_o)
        exact += contribution
        x = pages + contribution
        gap = torch.ldexp(torch.ones_like(x), x.frexp().exponent - 8)  # 8 significant bits
        below = (x / gap).floor() * gap
        variance += (x - below) * (below + gap - x)
        fourth += (x - below) * (below + gap - x) * gap.square()
        if nearest:
            pages = x.bfloat16().double()
        else:
            pages = add(problem, q, d_o, engine_seed(chunk)).double()
        if chunk + 1 in (16, 64, 256):
            results[chunk + 1] = Rounded(
                pages - exact, exact.clone(), variance.clone(), fourth.clone()
            )
    return results


@pytest.mark.parametrize("common_part", [0.0, 1.0], ids=["zero_mean", "common_part"])
def test_bfloat16_pages_are_unbiased_with_the_variance_of_stochastic_rounding(
    common_part: float,
) -> None:
    for result in accumulate(common_part).values():
        assert abs(result.bias) < DEVIATIONS
        assert abs(result.variance_ratio - 1) < DEVIATIONS * result.variance_ratio_deviation


def test_bfloat16_error_of_a_random_walk_grows_with_the_root_of_the_chunks() -> None:
    # An add leaves gap^2 / 6 on average, and a gap is between 2^-8 and 2^-7 of the sum. The square
    # of a random walk's sum grows with the chunks, so their mean is half of the last.
    for chunks, result in accumulate(0.0).items():
        largest = 2.0**-7 * math.sqrt((chunks + 1) / 12)
        assert largest / 2 < result.relative < largest, chunks


def test_the_bounds_tell_rounding_to_nearest() -> None:
    walk = accumulate(0.0, nearest=True)[CHUNKS]
    assert walk.variance_ratio < 1 - DEVIATIONS * walk.variance_ratio_deviation
    # Where every chunk adds about the same, many adds in a row are rounded to the same side.
    assert abs(accumulate(1.0, nearest=True)[CHUNKS].bias) > DEVIATIONS


@pytest.mark.parametrize("common_part", [0.0, 1.0], ids=["zero_mean", "common_part"])
def test_float32_pages_lose_one_rounding_per_add(common_part: float) -> None:
    chunks = Chunks(common_part)
    problem = Problem(CASE)
    reference = Problem(dataclasses.replace(CASE, dtype=torch.float64, dkv_dtype=torch.float64))
    for name in ("kv_pool", "k", "v"):  # random numbers drawn in fp64, rounded as the case's
        setattr(reference, name, getattr(problem, name).double())
    reference.block_table, reference.scale = problem.block_table, problem.scale
    total, bound = torch.zeros(()), torch.zeros(())
    kernels = 0.0
    for _ in range(CHUNKS):
        q, d_o = chunks.draw()
        contribution = chunks.contribution(q, d_o)
        total = total + contribution
        pages = add(problem, q, d_o)
        # The sum is rounded, and scale * gradient may have been, before it or never.
        bound = bound + 2.0**-24 * (pages.double().abs() + contribution.abs())
        kernels += 2e-6 * float(contribution.norm())  # what test_cpu_kernels grants one chunk
        exact = add(reference, q, d_o)
    assert ((pages - total).abs() <= bound).all()
    assert float((pages - exact).norm()) <= float(bound.norm()) + kernels
