"""Sharded weights for one rank, which runs the model's own forward while the others help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import oomb
from engine.reference import random_ids, relative_error
from oomb.engine.lent import on_first
from oomb.parallel.group import Ranks
from oomb.parallel.sharding import ShardedWeights

from .test_sharded_weights import CASES, POLICIES, config_of, expect_as_before, model_of, sharded
from .world import World, meshes

RANKS = 4


def forward_twice(model: Any, policy: str) -> torch.Tensor:
    """Logits, by calls of unlike length; between them no rank has a layer of zero3."""
    assert not isinstance(model, FSDPModule)
    ids = random_ids(1, 9)
    first = model(ids[:, :4], use_cache=True)
    held = sum(p.untyped_storage().nbytes() for p in model.model.layers.parameters())
    assert (held == 0) == (policy == "zero3")
    second = model(ids[:, 4:], past_key_values=first.past_key_values)
    assert not second.logits.requires_grad
    return torch.cat([first.logits, second.logits], 1)


def lent(rank: int, policy: str) -> list[Any]:
    """What two borrowings give, with an error of the borrower and one of a lender between them."""
    model = sharded(model_of(CASES["plain"], RANKS), RANKS)
    config = config_of(CASES["plain"], sharded_weights=policy)
    engine = oomb.Engine(model, config, mesh=meshes[RANKS])
    notes = Ranks(list(range(RANKS)), torch.device("cpu"))

    def failing(_: Any) -> None:
        model(random_ids(1, 3))
        raise KeyError("no such tool")

    def no_room(*_: Any) -> None:
        raise oomb.OutOfMemoryError("no room", needed_bytes=2, available_bytes=1)

    found: list[Any] = [on_first(engine, notes, lambda: forward_twice(model, policy))]
    found.append(told(lambda: on_first(engine, notes, lambda: failing(model))))
    expect_as_before(model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(ShardedWeights, "pass_by", no_room)
        error = told(lambda: on_first(engine, notes, lambda: forward_twice(model, policy)))
    found.append(error if policy == "zero3" else None)
    found.append(on_first(engine, notes, lambda: forward_twice(model, policy)))
    expect_as_before(model)
    engine.close()
    notes.close()
    return found


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_rank_runs_the_model(world: World, policy: str) -> None:
    model = model_of(CASES["plain"], RANKS)
    with torch.no_grad():
        expected = model(random_ids(1, 9)).logits
    answers = world.run(lent, policy)
    for rank, (first, of_first, of_lender, last) in enumerate(answers):
        assert "no such tool" in of_first
        assert of_first.startswith("KeyError: " if rank == 0 else "Error: [rank 0] KeyError")
        if policy == "zero3":
            assert of_lender.startswith("OutOfMemoryError: [rank 2]")
        for logits in (first, last):
            assert (logits is None) == (rank > 0)
            assert logits is None or relative_error(logits, expected) < 1e-14
