"""Sharded weights for one rank, which runs the model's own forward while the others help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Lending(NamedTuple):
    """How weights are shared, and whether whole ones are wanted and fit."""

    policy: str
    at_once: bool = True
    has_room: bool = True

    @property
    def by_layer(self) -> bool:
        return self.policy == "zero3" and not (self.at_once and self.has_room)


LENDINGS = {
    **{policy: Lending(policy) for policy in POLICIES},
    "zero3, layers": Lending("zero3", at_once=False),
    "zero3, no room on one rank": Lending("zero3", has_room=False),
}


def forward_twice(model: Any, by_layer: bool) -> torch.Tensor:
    """Logits, by calls of unlike length; between them a rank has all layers or none."""
    assert not isinstance(model, FSDPModule)
    ids = random_ids(1, 9)
    first = model(ids[:, :4], use_cache=True)
    held = sum(p.untyped_storage().nbytes() for p in model.model.layers.parameters())
    assert (held == 0) == by_layer
    second = model(ids[:, 4:], past_key_values=first.past_key_values)
    assert not second.logits.requires_grad
    return torch.cat([first.logits, second.logits], 1)


def lent(rank: int, how: Lending) -> list[Any]:
    """What two borrowings give, with an error of the borrower and one of a lender between them."""
    model = sharded(model_of(CASES["plain"], RANKS), RANKS)
    config = config_of(CASES["plain"], sharded_weights=how.policy)
    engine = oomb.Engine(model, config, mesh=meshes[RANKS])
    notes = Ranks(list(range(RANKS)), torch.device("cpu"))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())

    def failing() -> None:
        model(random_ids(1, 3))
        raise KeyError("no such tool")

    def no_room(*_: Any) -> None:
        raise oomb.OutOfMemoryError("no room", needed_bytes=2, available_bytes=1)

    def borrowed(work: Callable[[], Any] = lambda: forward_twice(model, how.by_layer)) -> Any:
        return on_first(engine, notes, work, at_once=how.at_once)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            free = 2 * whole - (0 if how.has_room else 1)
            patch.setattr("oomb.engine.lent.free_memory", lambda _: free)
        found: list[Any] = [borrowed(), told(lambda: borrowed(failing))]
        expect_as_before(model)
        with pytest.MonkeyPatch.context() as poor:
            if rank == 2:
                poor.setattr(ShardedWeights, "pass_by", no_room)
            found.append(told(borrowed) if how.by_layer else None)
        found.append(borrowed())
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


@pytest.mark.parametrize("name", LENDINGS)
@pytest.mark.sampled(3)
def test_the_first_rank_runs_the_model(world: World, name: str) -> None:
    model = model_of(CASES["plain"], RANKS)
    with torch.no_grad():
        expected = model(random_ids(1, 9)).logits
    answers = world.run(lent, LENDINGS[name])
    for rank, (first, of_first, of_lender, last) in enumerate(answers):
        assert "no such tool" in of_first
        assert of_first.startswith("KeyError: " if rank == 0 else "Error: [rank 0] KeyError")
        if LENDINGS[name].by_layer:
            assert of_lender.startswith("OutOfMemoryError: [rank 2]")
        for logits in (first, last):
            assert (logits is None) == (rank > 0)
            assert logits is None or relative_error(logits, expected) < 1e-14
