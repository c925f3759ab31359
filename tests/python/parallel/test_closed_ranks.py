"""One rank closes its engine: nobody waits for it, neither itself nor the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

import oomb
from engine.models import make
from engine.reference import random_ids
from oomb.parallel import group
from oomb.parallel.group import Ranks

from .world import World, meshes

CONFIG: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
IDS = random_ids(1, 40)
LONGEST_SECONDS = 25.0  # far more than it takes on a busy machine, far less than a timeout
OPEN = "Error: engine: expected an open engine, got one that was closed"


def text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (oomb.Error, ZeroDivisionError) as error:
        kind = "Error" if isinstance(error, oomb.Error) else type(error).__name__
        return f"{kind}: {error}"
    return "no error"


def texts_of_calls(engine: oomb.Engine) -> list[str]:
    return [
        text_of(lambda: engine.forward_backward(IDS, IDS)),
        text_of(lambda: engine.evaluate(IDS, IDS)),
        text_of(lambda: engine.two_pass(IDS, IDS)),
    ]


def closes(rank: int, when: str) -> list[str]:
    """What the calls of a rank raise, where the second one of each sequence has closed."""
    model = make("qwen2", num_key_value_heads=4, num_attention_heads=8, num_hidden_layers=2)
    engine = oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2])
    engine.forward_backward(IDS, IDS)
    leaves, child = rank >= 2, 0

    def fail(_: oomb.Progress) -> None:
        if leaves:
            raise ZeroDivisionError

    if when == "after an error":
        text_of(lambda: engine.forward_backward(IDS, IDS, on_progress=fail))
    if leaves and when == "they wait":
        time.sleep(0.5)
    if leaves and when == "a child has the connections":
        child = os.fork()
        if child == 0:
            time.sleep(2 * LONGEST_SECONDS)
            os._exit(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_ON_ITS_WAY", 0.5)
        if leaves or when == "all":
            engine.close()
        found = texts_of_calls(engine)
    dist.barrier()
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    engine.close()
    return found


@pytest.mark.parametrize(
    "when", ["they wait", "after an error", "a child has the connections", "all"]
)
def test_calls_of_a_closed_engine_end_on_all_ranks(world: World, when: str) -> None:
    world.start(closes, when)
    found = world.answers(seconds=LONGEST_SECONDS)
    for rank, texts in enumerate(found):
        gone = f"Error: [rank {rank + 2}] rank {rank + 2} has closed its engine"
        assert texts == [OPEN if rank >= 2 or when == "all" else gone] * 3, found


def between_two_passes(rank: int) -> str:
    model = make("qwen2", num_key_value_heads=4, num_attention_heads=8, num_hidden_layers=2)
    engine = oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2])
    try:
        with engine.two_pass(IDS, IDS) as two:
            two.logprobs.sum().backward()
            if rank >= 2:
                engine.close()
            two.sweep()
    except oomb.Error as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_a_sweep_of_a_closed_engine_ends_on_all_ranks(world: World) -> None:
    world.start(between_two_passes)
    *others, third, fourth = world.answers(seconds=LONGEST_SECONDS)
    assert others == [f"[rank {rank}] rank {rank} has closed its engine" for rank in (2, 3)]
    assert third == fourth == OPEN.removeprefix("Error: ")


def leaves_a_block(_: int) -> str:
    model = make("qwen2", num_key_value_heads=4, num_attention_heads=8, num_hidden_layers=2)
    engine = oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2])

    def fill() -> None:
        with engine.two_pass(IDS, IDS):
            engine.close()

    return text_of(fill)


def test_a_filled_block_that_all_have_closed_is_left_in_peace(world: World) -> None:
    world.start(leaves_a_block)
    assert world.answers(seconds=LONGEST_SECONDS) == ["no error"] * 4


def of_closed_ranks(rank: int) -> list[str]:
    ranks = Ranks(list(range(4)), torch.device("cpu"))
    ranks.collect(lambda: None)
    ranks.close()
    ranks.close()
    return [text_of(lambda: ranks.collect(lambda: None)), text_of(ranks.call().__enter__)]


def test_closed_ranks_do_not_connect_again(world: World) -> None:
    expected = "Error: ranks: expected a call before they were closed, got one after it"
    world.start(of_closed_ranks)
    assert world.answers(seconds=LONGEST_SECONDS) == [[expected] * 2] * 4
