"""Each family that sees images on two ranks equals one ordinary backward, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from engine.image_conditions import (
    ALL,
    CONDITIONS,
    arguments,
    expected_of,
    make_family,
    settings_of,
)
from engine.recurrent_models import nothing_rounds_to_float32
from engine.reference import Result

from .test_conditions_over_ranks import assert_as_one, called_twice
from .world import World, one_group


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


def over_ranks(
    rank: int, family: str, condition: str, recompute: str
) -> tuple[Result, Result] | None:
    if one_group[2].get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model = make_family(family, condition)
        config = settings_of(model, family, condition, one_group[2], recompute=recompute)
        return called_twice(model, config, arguments(family, condition))


# Run each time: conditions that test_images_over_ranks.py has of no family, or of others.
QUICK = {
    ("qwen3.5", "documents", "layer"),
    ("qwen3.5", "padding", "none"),
    ("gemma3", "adapters", "layer"),
    ("gemma4", "documents", "none"),
    ("gemma4", "tail of 2", "layer"),
    ("qwen3-vl", "tail of 3", "none"),
}
WHERE = [
    pytest.param(*way, marks=[] if way in QUICK else [pytest.mark.slow, pytest.mark.release])
    for way in itertools.product(ALL, CONDITIONS, ("none", "layer"))
]


@pytest.mark.parametrize(("family", "condition", "recompute"), WHERE)
def test_equals_one_backward(world: World, family: str, condition: str, recompute: str) -> None:
    model, given = make_family(family, condition), arguments(family, condition)
    world.start(over_ranks, family, condition, recompute)
    expected = expected_of(model, family, given)
    assert_as_one(world.answers(), expected, spills=CONDITIONS[condition].few_pages)
