"""bench/'s training over ranks that gathers keys and values, against one ordinary backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from support.gathered_rival import Gathered

from engine.models import make
from engine.reference import (
    Result,
    assert_equal,
    ordinary,
    random_ids,
    take_gradients,
)
from oomb.trace.shapes import ModelShape

from .world import World, meshes

SHAPE = ModelShape("qwen2", 2, 48, 64, 6, 2, 8, 97)
TOKENS = 24 * 12  # more than a tile on each of two ranks; divisible by twice 2, 3 and 4


def model_of(name: str) -> Any:
    return make(name, num_hidden_layers=SHAPE.layers)


def steps(rank: int, name: str, ranks: int, sharded: bool, keep: bool) -> Any:
    """The second step of two, other tokens before it."""
    mesh = meshes[ranks]
    if mesh.get_coordinate() is None:
        return None
    model = model_of(name)
    implementation = model.config._attn_implementation
    for module in (*model.model.layers, model) if sharded else ():
        fully_shard(module, mesh=mesh)
    rival = Gathered(model, SHAPE, mesh, keep=keep, kernel="cpu")
    with rival.prepared(TOKENS):
        rival.step(random_ids(1, TOKENS, seed=1))
        model.zero_grad()
        loss = rival.step(random_ids(1, TOKENS))
    assert model.config._attn_implementation == implementation
    gradients: dict[str, Any] = take_gradients(model)
    for key, value in gradients.items():
        if isinstance(value, DTensor):
            gradients[key] = value.full_tensor()
    return Result(loss, gradients)


@pytest.mark.parametrize(
    ("name", "ranks", "sharded", "keep"),
    [
        ("qwen2", 2, False, False),
        ("qwen3", 2, True, True),
        ("qwen2-tied", 3, True, False),
        ("llama", 4, False, True),
    ],
)
def test_equals_one_backward(
    world: World, name: str, ranks: int, sharded: bool, keep: bool
) -> None:
    world.start(steps, name, ranks, sharded, keep)
    ids = random_ids(1, TOKENS)
    expected = ordinary(model_of(name), ids, ids)
    for found in world.answers():
        if found is not None:
            assert_equal(found, expected)
