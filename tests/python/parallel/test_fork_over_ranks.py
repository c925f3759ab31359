"""A process forked from a rank's own is none of the ranks: it leaves, and nobody waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import oomb
from engine.children import ended, exit_code_of_child
from engine.models import make
from engine.reference import Result, assert_identical, random_ids, take_gradients

from .world import World, meshes

CONFIG: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
FORKED = 2  # the second rank of its sequence
IDS = random_ids(1, 40)


def model_of_a_rank() -> Any:
    return make("qwen2", num_key_value_heads=4, num_attention_heads=8, num_hidden_layers=2)


def usual(engine: oomb.Engine, model: Any) -> Result:
    step = engine.forward_backward(IDS, IDS)
    return Result(step.loss, take_gradients(model), step)


def close(kept: list[oomb.Engine]) -> None:
    with kept[0]:
        pass
    kept[0].close()


def collect(kept: list[oomb.Engine]) -> None:
    kept.clear()


def refused(call: Callable[[], object], parent: int) -> None:
    both = rf"expected a call in process {parent}, .* process {os.getpid()}, forked from it"
    with pytest.raises(oomb.Error, match=both):
        call()


def call(kept: list[oomb.Engine]) -> None:
    engine, parent = kept[0], os.getppid()
    refused(lambda: engine.forward_backward(IDS, IDS), parent)
    refused(lambda: engine.evaluate(IDS, IDS), parent)
    refused(lambda: engine.two_pass(IDS, IDS), parent)
    refused(lambda: engine.plan(40), parent)


IN_THE_CHILD = {"close": close, "collect": collect, "call": call}


def with_a_child(rank: int, what: str) -> tuple[int | None, list[Result]]:
    model = model_of_a_rank()
    kept = [oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2])]
    before = usual(kept[0], model)
    code: int | None = 0
    if rank == FORKED:
        code = exit_code_of_child(partial(IN_THE_CHILD[what], kept))
    after = usual(kept[0], model)
    kept[0].close()
    return code, [before, after]


@pytest.mark.parametrize("what", IN_THE_CHILD)
def test_a_child_waits_for_nothing(world: World, what: str) -> None:
    for code, (before, after) in world.run(with_a_child, what):
        assert code == 0
        assert_identical(after, before)


def with_a_child_between_two_passes(rank: int) -> int | None:
    model, code = model_of_a_rank(), 0
    parent = os.getpid()
    with oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2]) as engine:
        with engine.two_pass(IDS, IDS) as two:
            two.logprobs.sum().backward()
            if rank == FORKED:
                code = exit_code_of_child(lambda: refused(two.sweep, parent))
            two.sweep()
        assert len(take_gradients(model)) > 0
    return code


def test_a_child_cannot_sweep(world: World) -> None:
    assert world.run(with_a_child_between_two_passes) == [0] * 4


def with_a_child_of_a_callback(rank: int) -> tuple[list[int | None], list[Result]]:
    """It leaves the call with an error, as a program that ends there does."""
    model, children = model_of_a_rank(), []

    def on_progress(_: oomb.Progress) -> None:
        if rank == FORKED and not children:
            children.append(os.fork())
            if children == [0]:
                raise SystemExit
            time.sleep(1)  # in which the others would hear of it

    with oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2]) as engine:
        expected = usual(engine, model)
        try:
            engine.forward_backward(IDS, IDS, on_progress=on_progress)
        finally:
            if children == [0]:
                os._exit(0)
        found = take_gradients(model)
        codes = [ended(child) for child in children]
    return codes, [expected, Result(expected.loss, found, expected.step)]


def test_a_child_that_leaves_a_call_tells_nobody(world: World) -> None:
    for rank, (codes, (expected, found)) in enumerate(world.run(with_a_child_of_a_callback)):
        assert codes == ([0] if rank == FORKED else [])
        for name, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[name], gradient)
