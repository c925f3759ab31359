"""Rates are measured with what there is room for, however large the model that is planned."""

from __future__ import annotations

import pytest
import torch

from oomb.core.tiers import PageLayout
from oomb.model.layer_shape import LayerShape
from oomb.plan import Machine, rates
from oomb.plan.rates import measured_rates, product_within


@pytest.mark.parametrize(
    ("numbers", "rows", "hidden", "inner", "expected"),
    [
        (10**9, 512, 1024, 4096, (1024, 4096)),
        (512 * 2048 + 2**20, 512, 1024, 4096, (1024, 1024)),
        (512 * 2048 + 2**20 - 1, 512, 1024, 4096, (1024, 512)),
        (0, 512, 2**18, 2**22, (64, 64)),
    ],
)
def test_the_larger_side_is_halved_until_it_fits(
    numbers: int, rows: int, hidden: int, inner: int, expected: tuple[int, int]
) -> None:
    assert product_within(numbers, rows, hidden, inner) == expected


def test_a_product_beyond_memory_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 4 TiB, where 64 MiB are free."""
    monkeypatch.setattr(rates, "free_memory", lambda _: 2**26)
    monkeypatch.setattr(rates, "_measured", {})
    largest = 0
    own = torch.randn

    def counted(*size: object, **settings: object) -> torch.Tensor:
        nonlocal largest
        made: torch.Tensor = own(*size, **settings)  # type: ignore[call-overload]
        largest = max(largest, made.nbytes)
        return made

    monkeypatch.setattr(torch, "randn", counted)
    found = measured_rates(
        Machine.here("cpu"),
        shape=LayerShape(query_heads=8, kv_heads=8, head_dim=128, window=0),
        layout=PageLayout.of(8, 128, 128, torch.float32, "float32"),
        hidden=2**18,
        inner=2**22,
        dtype=torch.float32,
        chunk=4096,
        batch=1,
        selection=None,
    )
    assert found.matrix > 0 and found.past_forward > 0
    assert 0 < largest <= 2**26
