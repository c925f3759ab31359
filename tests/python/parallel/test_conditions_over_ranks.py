"""Each family on two ranks equals one process, and one ordinary backward, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import oomb
from engine.conditions import (
    CONDITIONS,
    FAMILIES,
    arguments,
    expected_of,
    make_family,
    settings_of,
)
from engine.recurrent_models import nothing_rounds_to_float32
from engine.reference import Result, assert_equal, assert_identical, take_gradients

from .world import World, one_group


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


def over_ranks(
    rank: int, name: str, condition: str, recompute: str
) -> tuple[Result, Result] | None:
    if one_group[2].get_coordinate() is None:
        return None
    case = CONDITIONS[condition]
    with nothing_rounds_to_float32():
        model = make_family(name, case)
        config = settings_of(model, case, one_group[2], recompute=recompute)
        return called_twice(model, config, arguments(case))


def called_twice(model: Any, config: oomb.Config, given: dict[str, Any]) -> tuple[Result, Result]:
    """Calls of one engine."""
    with oomb.Engine(model, config, mesh=one_group[2]) as engine:

        def call() -> Result:
            step = engine.forward_backward(**given)
            return Result(step.loss, take_gradients(model), step)

        return call(), call()


def assert_as_one(
    answers: Sequence[tuple[Result, Result] | None], expected: Result, *, spills: bool
) -> None:
    """All ranks have the gradients of one process, twice the same bits."""
    results = [answer for answer in answers if answer is not None]
    assert len(results) == 2
    for found, again in results:
        assert_equal(found, expected)
        assert_identical(found, results[0][0])
        assert_identical(again, found)
        assert found.step is not None
        assert found.step.stats.h2d_bytes > 0 or not spills


# Run each time: families that no other test runs on ranks, and adapters beside frozen layers whose
# input all ranks have sent: in a layer that is computed again it must have the same strides.
QUICK = {
    *(
        (name, "tail of 3", "layer")
        for name in (
            *("qwen3.5-moe", "qwen3-next", "olmo-hybrid", "bamba", "granite-4-h", "lfm3"),
            *("gemma4-31b", "gemma4-26b-a4b", "gemma3n", "vaultgemma"),
            *("mimo-v2", "phi3.5-moe", "qwen2-moe", "qwen3-moe"),
        )
    ),
    ("nemotron-h", "adapters", "layer"),
    ("falcon-7b", "tail of 1", "none"),
    ("falcon-40b", "documents", "layer"),
    ("falcon-in-turn", "padding", "none"),
}
WHERE = [
    pytest.param(*way, marks=[] if way in QUICK else [pytest.mark.slow, pytest.mark.release])
    for way in itertools.product(FAMILIES, CONDITIONS, ("none", "layer"))
]


@pytest.mark.parametrize(("name", "condition", "recompute"), WHERE)
def test_equals_one_backward(world: World, name: str, condition: str, recompute: str) -> None:
    case = CONDITIONS[condition]
    model, given = make_family(name, case), arguments(case)  # skips where there is none
    world.start(over_ranks, name, condition, recompute)
    expected = expected_of(model, given)
    assert_as_one(world.answers(), expected, spills=case.few_pages)
