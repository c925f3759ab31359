"""Layers that hand states from token to token, on ranks that share sequences."""

from __future__ import annotations

from typing import Any

import pytest

import oomb
from engine.recurrent_models import make_recurrent, nothing_rounds_to_float32
from engine.reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    take_gradients,
)
from engine.test_carry import document_ids
from engine.two_pass_losses import LOSSES, assert_close, two_passes
from engine.two_pass_losses import ordinary as ordinary_of_loss

from .world import World, meshes, one_group


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(**{"chunk_size": 16, "page_size": 8, **settings})


def model_of(name: str, ranks: int) -> Any:
    """With heads that so many ranks can share."""
    return make_recurrent(name, **({"num_key_value_heads": 1} if ranks == 3 else {}))


def over_ranks(
    rank: int, name: str, ranks: int, settings: oomb.Config, given: dict[str, Any]
) -> tuple[Result, Result] | None:
    if one_group[ranks].get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model = model_of(name, ranks)
        with oomb.Engine(model, settings, mesh=one_group[ranks]) as engine:

            def call() -> Result:
                step = engine.forward_backward(**given)
                return Result(step.loss, take_gradients(model), step)

            return call(), call()


def compare(
    world: World, name: str, ranks: int, settings: oomb.Config, given: dict[str, Any]
) -> None:
    model_of(name, ranks)  # skips where there is none
    world.start(over_ranks, name, ranks, settings, given)
    with nothing_rounds_to_float32():
        model = model_of(name, ranks)
        expected = ordinary(model, **given) if "document_ids" not in given else None
        alone = chunked(model, settings, **given)
    found = [answer for answer in world.answers() if answer is not None]
    assert len(found) == ranks
    for first, again in found:
        assert_equal(first, alone)
        if expected is not None:
            assert_equal(first, expected)
        assert_identical(first, found[0][0])
        assert_identical(again, found[0][0])


# Ranks and families; one of each kind of state or place in a layer.
QUICK = [("qwen3.5", 2), ("nemotron-h", 3), ("lfm2", 4)]
SLOW = [("falcon-h1", 2), ("kimi-linear", 4), ("zamba2", 2), ("zaya", 2)]


@pytest.mark.parametrize(
    ("name", "ranks"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
@pytest.mark.sampled(2)
def test_families(world: World, name: str, ranks: int) -> None:
    """A tail of three tokens, of which the last predicts nothing; four ranks have two for it."""
    ids = random_ids(2, 35)
    recompute = "layer" if ranks == 2 else "none"
    given = {"input_ids": ids, "labels": ids}
    compare(world, name, ranks, config(recompute=recompute), given)


def test_documents(world: World) -> None:
    """That begin in slices, at borders of slices and of chunks."""
    ids = random_ids(2, 52)
    documents = document_ids(2, 52, [[5, 8, 16, 17, 40], [24, 48]])
    given = {"input_ids": ids, "labels": ids, "document_ids": documents}
    compare(world, "qwen3.5", 2, config(), given)


def in_two_passes(rank: int) -> Any:
    with nothing_rounds_to_float32():
        model = make_recurrent("qwen3.5")
        with oomb.Engine(model, config(), mesh=meshes[2]) as engine:
            two_passes(engine, *LOSSES["dpo"])
    return take_gradients(model)


def test_two_passes(world: World) -> None:
    make_recurrent("qwen3.5")
    world.start(in_two_passes)
    with nothing_rounds_to_float32():
        expected = ordinary_of_loss(make_recurrent("qwen3.5"), LOSSES["dpo"][0])
    for found in world.answers():
        assert_close(found, expected)
