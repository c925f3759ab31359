"""Each family that sees images under each condition equals one ordinary backward, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import oomb

from .image_conditions import ALL, CONDITIONS, arguments, expected_of, make_family, settings_of
from .image_models import FAMILIES
from .recurrent_models import nothing_rounds_to_float32
from .reference import assert_equal, assert_identical, chunked


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


# Quick: one way of each kind of condition.
_OF_EACH = [
    ("documents", "layer"),
    ("padding", "none"),
    ("tiers", "layer"),
    ("adapters", "none"),
    ("upper layers", "layer"),
]
QUICK = {
    *((family, *way) for family in FAMILIES for way in _OF_EACH),
    ("qwen3-vl", "tail of 1", "layer"),
    ("qwen3.5", "tail of 1", "none"),
    ("gemma3", "tail of 2", "none"),
    ("gemma4", "tail of 3", "layer"),
}
WHERE = [
    pytest.param(*way, marks=[] if way in QUICK else [pytest.mark.slow, pytest.mark.release])
    for way in itertools.product(ALL, CONDITIONS, ("none", "layer"))
]


@pytest.mark.parametrize(("family", "condition", "recompute"), WHERE)
@pytest.mark.sampled(18)
def test_equals_one_backward(family: str, condition: str, recompute: str) -> None:
    case = CONDITIONS[condition]
    model, given = make_family(family, condition), arguments(family, condition)
    config = settings_of(model, family, condition, recompute=recompute)
    found = chunked(model, config, **given)
    assert_equal(found, expected_of(model, family, given))
    of_tower = [name for name in found.gradients if "vis" in name]
    assert bool(of_tower) == (condition not in ("adapters", "upper layers"))
    if case.few_pages:
        assert found.step is not None
        assert found.step.stats.h2d_bytes > 0
        roomy = replace(config, device_memory=None, host_memory=None)
        assert_identical(found, chunked(model, roomy, **given))


@pytest.mark.parametrize("family", ["qwen3.5", "gemma3"])
@pytest.mark.parametrize("tail", [1, 2, 3])
def test_last_chunks_are_as_long_as_the_conditions_say(family: str, tail: int) -> None:
    condition = f"tail of {tail}"
    model, given = make_family(family, condition), arguments(family, condition)
    lengths = []

    def note(_: Any, args: tuple[Any, ...]) -> None:
        lengths.append(args[1].shape[-1])

    with oomb.Engine(model, settings_of(model, family, condition)) as engine:
        model.get_decoder().rotary_emb.register_forward_pre_hook(note)
        engine.evaluate(**given)
    assert lengths[-1] == tail
    assert len(lengths) >= 3
