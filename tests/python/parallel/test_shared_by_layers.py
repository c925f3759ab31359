"""Weights that layers of a decoder share, where the others are sharded over ranks: still one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import oomb
from engine.models import make
from engine.recurrent_models import make_recurrent, nothing_rounds_to_float32
from engine.reference import random_ids
from oomb.engine.ranks import shard_model
from oomb.errors import UnsupportedModelError
from trainer.runs import logged

from .test_handed_out import trainer_of, without_weights
from .world import World, as_started, meshes

RANKS, STEPS = 4, 3
SHARED = [f"model.layers.{layer}.shared_transformer.self_attn.q_proj.weight" for layer in (1, 3)]


class Found(NamedTuple):
    """What a rank has after some steps."""

    losses: list[float]
    are_one: bool
    is_whole: bool


def found(model: Any, losses: list[float]) -> Found:
    one, other = map(model.get_parameter, SHARED)
    return Found(losses, one is other, not isinstance(one, DTensor))


def trained(model: Any, mesh: Any, **settings: Any) -> Found:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, losses = random_ids(1, 40), []
    config = oomb.Config(chunk_size=16, page_size=8, **settings)
    with oomb.Engine(model, config, mesh=mesh) as engine:
        for _ in range(STEPS):
            losses.append(float(engine.forward_backward(ids, ids).loss))
            optimizer.step()
            optimizer.zero_grad()
    return found(model, losses)


def sharded(rank: int, policy: str) -> Found | None:
    mesh = meshes[2]
    if mesh.get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model = make_recurrent("zamba2")
        shard_model(model, mesh)
        return trained(model, mesh, sharded_weights=policy)


@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
@pytest.mark.sampled(1)
def test_steps_are_those_of_one_process(world: World, policy: str) -> None:
    with nothing_rounds_to_float32():
        alone = trained(make_recurrent("zamba2"), None)
    for ours in world.run(sharded, policy):
        if ours is not None:
            # Steps amplify rounding; what is untied is off by a tenth.
            assert ours.losses == pytest.approx(alone.losses, rel=1e-10)
            assert ours.are_one and ours.is_whole


def by_trainer(rank: int, folder: Path, by_first: bool) -> Found:
    model = make_recurrent("zamba2", torch.float32)
    given = without_weights(model).float() if by_first and rank else model
    with as_started(rank, RANKS):
        trainer = trainer_of(given, folder)
        trainer.train()
        trainer.engine.close()
    return found(given, logged(trainer, "loss"))


def test_weights_of_rank_0_alone(world: World, tmp_path: Path) -> None:
    everywhere = world.run(by_trainer, tmp_path, False)
    for mine, theirs in zip(world.run(by_trainer, tmp_path, True), everywhere, strict=True):
        assert mine == theirs and mine.are_one and mine.is_whole


def apart(rank: int) -> list[str] | None:
    """What is said of a model whose layers were sharded one by one, alone and under adapters."""
    mesh = meshes[2]
    if mesh.get_coordinate() is None:
        return None
    texts = []
    for adapted in (False, True):
        model = base = make_recurrent("zamba2")
        if adapted:
            model = get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj"]))
            model.to(torch.float64).requires_grad_(True)
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(UnsupportedModelError) as error:
            oomb.Engine(model, oomb.Config(sharded_weights="zero3"), mesh=mesh)
        texts.append(str(error.value))
    return texts


def test_shards_of_each_use_are_refused(world: World) -> None:
    for texts in world.run(apart):
        for text in texts or ():
            assert "shared_transformer" in text and "ignored_params" in text


def untied(rank: int, told: bool, changed: bool) -> bool | None:
    """Whether an engine takes a model whose head is no longer its embedding."""
    mesh = meshes[2]
    if mesh.get_coordinate() is None:
        return None
    model = make("qwen3-tied")
    model.lm_head.weight = torch.nn.Parameter(
        model.lm_head.weight.detach() * (1.1 if changed else 1)
    )
    model.config.tie_word_embeddings = not told
    shard_model(model, mesh)
    with oomb.Engine(model, oomb.Config(sharded_weights="zero3"), mesh=mesh) as engine:
        ids = random_ids(1, 40)
        return bool(engine.forward_backward(ids, ids).loss > 0)


@pytest.mark.parametrize(("told", "changed"), [(True, False), (False, True), (True, True)])
def test_what_was_untied_is_taken(world: World, told: bool, changed: bool) -> None:
    """The config says so, or the values do."""
    assert all(taken in (True, None) for taken in world.run(untied, told, changed))
