"""Products that wait for exchanges of ranks: which, in which order, and that none is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from oomb.core.later_products import LaterProducts
from oomb.parallel.placement import Placement


class Sums:
    """Notes what is added."""

    def __init__(self) -> None:
        self.added: list[tuple[nn.Parameter, int]] = []
        self.totals: dict[nn.Parameter, torch.Tensor] = {}

    def takes(self, weight: torch.Tensor) -> bool:
        return True

    def add_product(self, parameter: Any, left: Any, right: Any, first: int = 0) -> None:
        self.added.append((parameter, first))
        self.totals.setdefault(parameter, torch.zeros(3, 2)).addmm_(left.t(), right)

    def add_rows(self, parameter: Any, rows: Any, values: Any) -> None:
        raise AssertionError("not asked for here")


class Here:
    """A placement that has exchanges when a test says so."""

    exchange: Callable[[], object] | None = None

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        self.exchange = work


WEIGHTS = [nn.Parameter(torch.zeros(3, 2)) for _ in range(5)]
NAMES = dict(zip(WEIGHTS, "abcde", strict=True))


def run(steps: str) -> tuple[str, LaterProducts, Here, Sums]:
    """Letters are products of a weight each, ``|`` an exchange, ``.`` the end of a chunk; what was
    added and when, with ``|`` where an exchange ended."""
    sums, here = Sums(), Here()
    later, seen = LaterProducts(sums), ""
    with later.beside(cast(Placement, here)):
        for step in steps:
            if step == "|":
                assert here.exchange is not None
                here.exchange()
            elif step == ".":
                later.finish()
            else:
                weight = WEIGHTS["abcde".index(step)]
                later.add_product(weight, torch.ones(1, 3), torch.ones(1, 2))
            seen += "".join(NAMES[p] for p, _ in sums.added)[len(seen.replace("|", "")) :]
            seen += "|" * (step == "|")
    return seen, later, here, sums


@pytest.mark.parametrize(
    ("steps", "added"),
    [
        ("abc.abc.", "abcabc"),  # nobody sends
        ("abc||de.abc||de.", "abc||dea" + "b|c|de"),
        ("ab||.ab||.ab||.", "ab||a|b|a|b|"),
        ("a||.a||.", "a||a||"),  # one product, two exchanges
        ("abc||.abcd.", "abc||adbc"),  # no exchange comes: the end of the chunk does
        ("abc||.bcb.", "abc||bcb"),  # more than two wait: the first is added
        ("ab||.cd.ab||.", "ab||cda|b|"),
        ("abc|.d|.", "abc|d|"),  # of the chunk before nothing counts
    ],
)
def test_products_and_exchanges(steps: str, added: str) -> None:
    seen, _, _, sums = run(steps)
    assert seen == added
    for weight, name in NAMES.items():
        if number := steps.count(name):
            assert torch.equal(sums.totals[weight], torch.full((3, 2), float(number)))


def test_what_waits_is_dropped_with_its_call() -> None:
    _, later, here, sums = run("ab||.ab")
    assert here.exchange is None
    later.finish()
    assert [NAMES[p] for p, _ in sums.added] == ["a", "b"]


def test_values_that_need_gradients_are_added_outside_of_a_backward() -> None:
    sums, here = Sums(), Here()
    later = LaterProducts(sums)
    x = torch.ones(1, 2, requires_grad=True)
    with later.beside(cast(Placement, here)), torch.enable_grad():
        for _ in range(2):
            with torch.no_grad():
                later.add_product(WEIGHTS[0], torch.ones(1, 3), x)
                assert here.exchange is not None
                here.exchange()
                later.add_product(WEIGHTS[0], torch.ones(1, 3), x)
            later.finish()
    assert not sums.totals[WEIGHTS[0]].requires_grad
    assert torch.equal(sums.totals[WEIGHTS[0]], torch.full((3, 2), 4.0))
