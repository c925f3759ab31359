"""Bounds of pages: the least that is above every product, and what padding leaves of them."""

from __future__ import annotations

import pytest
import torch

from oomb.ops import bounding_queries, page_bounds

B, H, TOKENS, DIM, PAGE = 2, 3, 21, 8, 4  # the last page has one token


def naive(q: torch.Tensor, keys: torch.Tensor) -> float:
    """Of one query and some keys, number by number."""
    total = 0.0
    for d in range(DIM):
        total += max(float(q[d]) * float(key) for key in keys[:, d])
    return total


@pytest.mark.parametrize("num_rows", [None, (21, 9)])
def test_the_product_is_the_bound(num_rows: tuple[int, int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(B, H, TOKENS, DIM, dtype=torch.float64, generator=generator)
    q = torch.randn(B, H, DIM, dtype=torch.float64, generator=generator)
    rows = None if num_rows is None else torch.tensor(num_rows)
    bounds = page_bounds(k, PAGE, rows)
    assert bounds.shape == (B, 6, H, 2 * DIM)
    above = torch.einsum("bhd,bphd->bhp", bounding_queries(q[:, :, None])[:, :, 0], bounds)
    for b in range(B):
        length = TOKENS if num_rows is None else num_rows[b]
        for h in range(H):
            for page in range(6):
                keys = k[b, h, page * PAGE : min((page + 1) * PAGE, length)]
                expected = naive(q[b, h], keys) if len(keys) else 0.0
                assert above[b, h, page] == pytest.approx(expected, rel=1e-12, abs=1e-12)
                if len(keys):
                    assert above[b, h, page] >= (keys @ q[b, h]).max() - 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bounds_are_numbers_of_keys(dtype: torch.dtype) -> None:
    """Nothing is rounded, and a lone key is its own bound."""
    k = torch.randn(1, 1, 5, DIM).to(dtype)
    bounds = page_bounds(k, PAGE)
    assert bounds.dtype == dtype
    assert torch.equal(bounds[0, 0, 0, :DIM], k[0, 0, :4].amax(0))
    assert torch.equal(bounds[0, 0, 0, DIM:], -k[0, 0, :4].amin(0))
    assert torch.equal(bounds[0, 1, 0], torch.cat([k[0, 0, 4], -k[0, 0, 4]]))


def test_a_key_among_many_is_seen() -> None:
    """A key of four times the noise of 63 others, where the query looks: bounds put its page first,
    means mostly do not."""
    generator = torch.Generator().manual_seed(1)
    dim, pages, found = 64, 512, {"bounds": 0, "mean": 0}
    for _ in range(10):
        k = torch.randn(1, 1, pages * 64, dim, generator=generator)
        q = torch.randn(dim, generator=generator).sign()
        q[16:] = 0
        k[0, 0, 300 * 64 + 17] = 4 * q
        means = k.view(pages, 64, dim).mean(1) @ q
        bounds = page_bounds(k, 64)[0, :, 0] @ bounding_queries(q[None, None, None])[0, 0, 0]
        found["mean"] += int(means.argmax()) == 300
        found["bounds"] += int(bounds.argmax()) == 300
    assert found["bounds"] == 10 and found["mean"] <= 6, found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size: expected an int >= 1, got 0"),
        ({"k": torch.zeros(2, 3, 4)}, "k: expected "),
        ({"num_rows": torch.zeros(3, dtype=torch.int32)}, "num_rows: expected "),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"k": torch.zeros(2, 1, 8, 4), "page_size": 4}
    with pytest.raises(ValueError, match=message):
        page_bounds(**arguments | change)  # type: ignore[arg-type]


def test_queries_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"q: expected \[batch, heads, tokens, head_dim\], got"):
        bounding_queries(torch.zeros(2, 8))
