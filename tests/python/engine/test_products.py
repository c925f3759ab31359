"""Products of fp32 through oneDNN, forced on any processor that torch has it for."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import oomb
from oomb.model import products

from .models import make
from .reference import (
    Result,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    worst_error,
)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Products that oneDNN takes, whatever their size and the processor."""
    monkeypatch.setattr(products, "_LEAST_FLOPS", 1)
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)
    taken = mock.Mock(side_effect=products._one_dnn)
    monkeypatch.setattr(products, "_one_dnn", taken)
    return taken


def _matrix(*size: int, seed: int, transposed: bool = False) -> torch.Tensor:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return numbers.mT.contiguous().mT if transposed else numbers


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [((2, 37), 48, 80), ((1,), 1, 1), ((300,), 129, 7), ((5,), 7, 3)]
)
def test_each_product_is_that_of_fp64(
    calls: mock.Mock, rows: tuple[int, ...], inputs: int, outputs: int, transposed: bool
) -> None:
    several = len(rows) > 1
    x = _matrix(*rows, inputs, seed=1, transposed=transposed and not several)
    weight = _matrix(outputs, inputs, seed=2, transposed=transposed)
    d_y = _matrix(*rows, outputs, seed=3, transposed=transposed and not several)
    total = _matrix(outputs, inputs, seed=5)
    bias = _matrix(2 * outputs, seed=4)[::2] if transposed else _matrix(outputs, seed=4)
    wide = [t.double() for t in (x, weight, d_y, bias, total)]
    pairs = [
        (products.linear(x, weight, bias), wide[0] @ wide[1].T + wide[3]),
        (products.linear(x, weight), wide[0] @ wide[1].T),
        (products.input_gradient(d_y, weight), wide[2] @ wide[1]),
    ]
    flat = [t.reshape(-1, t.shape[-1]) for t in (d_y, x)]
    products.add_product(total, *flat)
    exact = [t.double() for t in flat]
    pairs.append((total, wide[4] + exact[0].T @ exact[1]))
    assert calls.call_count == 4
    for found, expected in pairs:
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 2e-6


def test_what_is_not_finite_stays_so(calls: mock.Mock) -> None:
    x, weight = _matrix(3, 4, seed=1), _matrix(2, 4, seed=2)
    x[1, 2] = torch.nan
    found = products.linear(x, weight)
    assert calls.called
    assert bool(found[1].isnan().all()) and bool(found[[0, 2]].isfinite().all())


def test_other_products_stay_with_torch(calls: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes, no rows, tensors of others' classes, devices without memory, a user's wish."""

    class Own(torch.Tensor):
        pass

    x, weight = _matrix(3, 4, seed=1), _matrix(2, 4, seed=2)
    others = [
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (x[:0], weight),
        (x.as_subclass(Own), weight),
        (x.to("meta"), weight.to("meta")),
    ]
    for left, right in others:
        assert products.linear(left, right).shape == (len(left), 2)
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    products.linear(x, weight)
    assert not calls.called


def test_a_step_is_as_exact_as_ordinary_training_and_keeps_its_bits(calls: mock.Mock) -> None:
    ids = random_ids(2, 75)
    exact = make("qwen2-tied", torch.float64)
    model = make("qwen2-tied", torch.float32)
    expected, usual = ordinary(exact, ids, ids), ordinary(model, ids, ids)

    def step(keep: str) -> Result:
        config = oomb.Config(chunk_size=16, page_size=8, keep_outputs=keep)  # type: ignore[arg-type]
        return chunked(model, config, ids, ids)

    found = step("all")
    assert calls.call_count > 100
    assert worst_error(found, expected)[0] <= 2 * worst_error(usual, expected)[0]
    assert_identical(step("none"), found)
    assert_identical(step("all"), found)
