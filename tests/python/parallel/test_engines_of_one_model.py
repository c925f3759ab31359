"""Two engines of one sharded model: each call is heard of by the ranks of its own engine."""

from __future__ import annotations

from typing import Any

import pytest

import oomb
from engine.reference import random_ids

from .test_sharded_weights import CASES, config_of, model_of, sharded
from .world import World, meshes

LONGEST_SECONDS = 90.0


def failed(rank: int, other_closes: bool) -> tuple[list[int], str] | None:
    """Gathered bytes of a call before there is another engine, and behind it; then an error of one
    rank in a layer."""
    mesh = meshes[2]
    if mesh.get_coordinate() is None:
        return None
    model = sharded(model_of(CASES["plain"], 2), 2)
    ids, left = random_ids(1, 40), [0]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and mesh.get_local_rank() == 1:
            raise RuntimeError("an error of one rank")

    model.model.layers[1].mlp.register_forward_hook(fail)
    config = config_of(CASES["plain"], sharded_weights="zero3")
    engine = oomb.Engine(model, config, mesh=mesh)
    gathered = [engine.forward_backward(ids, ids).stats.gathered_weight_bytes]
    other = oomb.Engine(model, config, mesh=mesh)
    if other_closes:
        other.evaluate(ids, ids)
        other.close()
    gathered.append(engine.forward_backward(ids, ids).stats.gathered_weight_bytes)
    left[0] = 2
    with pytest.raises((RuntimeError, oomb.Error)) as error:
        engine.forward_backward(ids, ids)
    return gathered, str(error.value)


@pytest.mark.parametrize("other_closes", [False, True])
def test_an_error_is_raised_by_all(world: World, other_closes: bool) -> None:
    world.start(failed, other_closes)
    for answer in world.answers(seconds=LONGEST_SECONDS):
        if answer is not None:
            (before, behind), text = answer
            assert before == behind > 0
            assert "an error of one rank" in text
