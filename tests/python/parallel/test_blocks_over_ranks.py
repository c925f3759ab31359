"""Layers of blocks of tokens (Llama 4), on ranks that share sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from engine.block_models import make, rotation_in_own_dtype
from engine.reference import Result, assert_equal, chunked, ordinary, random_ids, take_gradients

from .world import World, meshes

CONFIG = oomb.Config(chunk_size=16, page_size=8)


def over_ranks(rank: int, ranks: int, given: dict[str, Any]) -> Result | None:
    if meshes[ranks].get_coordinate() is None:
        return None
    with rotation_in_own_dtype():
        model = make(12)
        with oomb.Engine(model, CONFIG, mesh=meshes[ranks]) as engine:
            step = engine.forward_backward(**given)
        return Result(step.loss, take_gradients(model), step)


@pytest.mark.parametrize("packed", [False, True])
def test_two_ranks(world: World, packed: bool) -> None:
    """Each scales its own tokens' queries by their places, and sees all first keys."""
    ids = random_ids(1, 51)
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if packed:
        lengths = torch.tensor([17, 13, 21])
        given["document_ids"] = torch.arange(3).repeat_interleave(lengths)[None]
    world.start(over_ranks, 2, given)
    with rotation_in_own_dtype():
        expected = chunked(make(12), CONFIG, **given) if packed else ordinary(make(12), ids, ids)
    found = [answer for answer in world.answers() if answer is not None]
    assert found
    for result in found:
        assert_equal(result, expected)
