"""Layers in float8 on a GPU: torchao's casts bit for bit, its products, and its gradients."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine.float8_case import expect_as_near_as_torchao

pytestmark = pytest.mark.gpu
logging.getLogger("torchao").setLevel(logging.ERROR)
float8_utils: Any = pytest.importorskip("torchao.float8.float8_utils")

from oomb.model.float8 import columns_in_float8, rows_in_float8, scaled_product  # noqa: E402

CODES = torch.float8_e4m3fn
SIZES = [(1, 16), (3, 48), (70, 3584), (257, 4112), (64, 18944)]


def theirs(x: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's codes and the inverse of its scales."""
    most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = float8_utils.amax_to_scale(most, CODES, round_scales_to_power_of_2=True)
    return float8_utils.to_fp8_saturated(x.float() * scale, CODES), scale.reciprocal()


def values(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, width, generator=generator, device="cuda")
    reach = torch.randint(-30, 30, (rows, 1), generator=generator, device="cuda")
    return (x * 2.0**reach).bfloat16()


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_casts_are_those_of_torchao(rows: int, width: int) -> None:
    x = values(rows, width)
    codes, scales = rows_in_float8(x)
    expected, inverse = theirs(x, 1)
    assert torch.equal(scales, inverse.view(-1))
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    turned, scales = columns_in_float8(x)
    expected, inverse = theirs(x, None)
    assert torch.equal(scales, inverse.expand(width))
    assert turned.is_contiguous()
    assert torch.equal(turned.view(torch.uint8), expected.t().contiguous().view(torch.uint8))


@pytest.mark.parametrize("most", [0.0, 1e-30, 1.0, 1.75, 1.7578125, 448.0, 450.0, 3e38])
def test_scales_at_their_borders(most: float) -> None:
    x = torch.zeros(2, 32, device="cuda", dtype=torch.bfloat16)
    x[0, 5], x[1, 30] = most, -most / 3
    for found, expected in zip(rows_in_float8(x), theirs(x, 1), strict=True):
        assert torch.equal(found.view(-1).float(), expected.reshape(-1).float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_visible(bad: float) -> None:
    x = torch.ones(3, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(16, 64, device="cuda", dtype=torch.bfloat16)
    x[1, 7] = bad
    for fast in (False, True):
        y = scaled_product(*rows_in_float8(x), *rows_in_float8(w), None, torch.bfloat16, fast)
        assert y[1].isnan().all() and bool((y[[0, 2]] == 64).all())
    assert columns_in_float8(x)[1].isnan().all()


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_products(rows: int, has_bias: bool, fast: bool) -> None:
    x, w = values(rows, 512) / 2**20, values(96, 512)
    bias = torch.randn(96, device="cuda").bfloat16() if has_bias else None
    (a, p), (b, q) = rows_in_float8(x), rows_in_float8(w)
    y = scaled_product(a, p, b, q, bias, torch.bfloat16, fast)
    exact = (a.double() * p[:, None]) @ (b.double() * q[:, None]).t()
    if bias is not None:
        exact += bias
    size = (a.double().abs() * p[:, None]) @ (b.double().abs() * q[:, None]).t()
    bound = 2.0**-8 * exact.abs() + (2.0**-11 if fast else 2.0**-13) * size
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("recompute", "dtype", "emulate"),
    [
        ("none", torch.bfloat16, False),
        ("layer", torch.bfloat16, False),
        ("none", torch.float32, False),
        ("none", torch.bfloat16, True),
    ],
)
def test_as_near_as_torchaos_own_layers(recompute: str, dtype: torch.dtype, emulate: bool) -> None:
    """To gradients in fp32: chunks through our products, where the GPU has them, and one pass
    through torchao's."""
    expect_as_near_as_torchao("cuda", dtype, recompute=recompute, emulate=emulate)
