"""One rank fails somewhere in a call: all raise the same, keep their gradients, and go on.

Places are drawn at random: a phase, a layer, a chunk and a rank of a small call.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

import oomb
from engine.models import make
from engine.reference import random_ids
from oomb.core.attention import ChunkAttention
from oomb.core.chunk_run import ChunkRun
from oomb.engine.call import Call
from oomb.engine.two_pass import TwoPass
from oomb.parallel import peers
from oomb.parallel.agreement import expect_own_device
from oomb.parallel.group import Ranks

from .world import Died, World, meshes

LAYERS, CHUNKS = 2, 3
TOKENS = 16 * CHUNKS
SUMS = 2000
BORDERS = 4
LONGEST_SECONDS = 25.0  # far more than it takes on a busy machine, far less than a timeout
LONGEST = timedelta(seconds=LONGEST_SECONDS)


class Place(NamedTuple):
    """Where a rank fails: in the forward or the backward of a layer's attention, or in between."""

    phase: str
    layer: int
    chunk: int
    rank: int
    how: str
    passes: int = 1
    ranks: int = 2


def places(count: int, kinds: list[str], seed: int, ranks: int = 2) -> list[Place]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        passes = draw.choice([1, 2])
        phases = ["fill", "sweep", "backward", "progress", "loss"]
        phase = draw.choice(phases if passes == 2 else phases[:-1])
        chunk = draw.randrange(CHUNKS - 1 if phase == "fill" else CHUNKS)
        where = phase, draw.randrange(LAYERS), chunk, draw.randrange(ranks)
        found.append(Place(*where, draw.choice(kinds), passes, ranks))
    return found


def fail(how: str) -> None:
    if how == "exception":
        raise ZeroDivisionError("in the middle")
    if how == "error":
        raise oomb.Error("one of ours")
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Sorry")
    if how == "other Error":  # of the same name as this package's
        raise sqlite3.OperationalError("database is locked")
    if how == "other ValueError":
        raise json.JSONDecodeError("no value", "{", 1)
    if how == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def failing(place: Place) -> Iterator[None]:
    """The process fails when it comes to a place."""
    begin, backward = ChunkAttention.begin, ChunkAttention.backward

    def is_there(chunk: int, phase: str, layer: int) -> bool:
        return (phase, layer, chunk) == (place.phase, place.layer, place.chunk)

    def failing_begin(self: ChunkAttention, run: ChunkRun, layer: int, *tensors: Any) -> None:
        if is_there(run.chunk, run.phase, layer):
            fail(place.how)
        begin(self, run, layer, *tensors)

    def failing_backward(self: ChunkAttention, run: ChunkRun, layer: int, *tensors: Any) -> Any:
        if is_there(run.chunk, "backward", layer):
            fail(place.how)
        return backward(self, run, layer, *tensors)

    ChunkAttention.begin, ChunkAttention.backward = failing_begin, failing_backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChunkAttention.begin, ChunkAttention.backward = begin, backward  # type: ignore[method-assign]


def call(rank: int, place: Place) -> tuple[str, bool, bool]:
    """A rank's error, whether its gradients stayed, and whether the next call is right: where the
    other rank has ended, an error that says so."""
    keys = place.ranks if place.passes == 1 else 1  # of which all ranks then hold a copy
    heads = {"num_key_value_heads": keys, "num_attention_heads": 6 if place.ranks == 2 else 8}
    model = make("qwen2", num_hidden_layers=LAYERS, **heads)
    ids = random_ids(1, TOKENS + 1)
    config = oomb.Config(chunk_size=16, page_size=8)
    engine = oomb.Engine(model, config, mesh=meshes[place.ranks])
    expected = gradients(engine, model, ids)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)

    def on_progress(progress: oomb.Progress) -> None:
        at = place.phase == "progress" and progress.chunk == place.chunk
        if at and rank == place.rank:
            fail(place.how)

    def step() -> None:
        if place.passes == 1:
            engine.forward_backward(ids, ids, on_progress=on_progress)
            return
        with engine.two_pass(ids, ids, on_progress=on_progress) as two:
            if place.phase == "loss" and rank == place.rank:
                fail(place.how)
            two.logprobs.square().sum().backward()
            two.sweep()

    text = "no error"
    try:
        if rank == place.rank:
            with failing(place):
                step()
        else:
            step()
    except (Exception, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    kept = all(bool((p.grad == 0.5).all()) for p in model.parameters() if p.grad is not None)
    if place.how in ("SIGTERM", "SIGKILL"):
        with pytest.raises(oomb.Error, match=f"rank {place.rank} has ended"):
            gradients(engine, model, ids)
        return text, kept, True
    found = gradients(engine, model, ids)
    engine.close()
    same = all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    return text, kept, same


def gradients(engine: oomb.Engine, model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    engine.forward_backward(ids, ids)
    return [p.grad for p in model.parameters()]


# What a failing rank raises itself, and what the other one does.
TEXTS = {
    "exception": ("ZeroDivisionError: in the middle", "Error: [rank {0}] ZeroDivisionError: in"),
    "interrupt": ("KeyboardInterrupt: ", "Error: [rank {0}] KeyboardInterrupt: "),
    "error": ("Error: [rank {0}] one of ours",) * 2,
    "memory": ("OutOfMemoryError: [rank {0}] torch needed ",) * 2,
}


# Of classes that only share a name, or a base, with those that ranks raise alike.
OTHERS = {
    "other Error": (
        "OperationalError: database is locked",
        "Error: [rank {0}] OperationalError: database is locked",
    ),
    "other ValueError": ("JSONDecodeError: no value", "ValueError: [rank {0}] no value"),
}


# The caller's own code goes on with the caller's own error.
IN_A_LOSS = TEXTS | {
    "error": ("Error: one of ours", "Error: [rank {0}] one of ours"),
    "memory": ("OutOfMemoryError: CUDA out of", "OutOfMemoryError: [rank {0}] CUDA out of"),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as ranks:
        yield ranks


def raised_by_all(world: World, place: Place) -> None:
    world.start(call, place)
    answers = world.answers(seconds=LONGEST_SECONDS * world.size / 2)
    for rank, (text, kept, same) in enumerate(answers):
        texts = OTHERS | (IN_A_LOSS if place.phase == "loss" else TEXTS)
        expected = texts[place.how][0 if rank == place.rank else 1].format(place.rank)
        assert text.startswith(expected), (place, answers)
        assert kept, place
        assert same, place


@pytest.mark.parametrize("how", OTHERS)
def test_an_error_of_another_package_stays_what_it_is(pair: World, how: str) -> None:
    raised_by_all(pair, Place("progress", 0, 1, 1, how, 1, 2))


@pytest.mark.parametrize("place", places(8, list(TEXTS), seed=1), ids=str)
def test_an_error_of_one_rank_is_raised_by_all(pair: World, place: Place) -> None:
    raised_by_all(pair, place)


@pytest.mark.slow
def test_errors_anywhere(pair: World) -> None:
    for place in places(60, list(TEXTS), seed=2):
        raised_by_all(pair, place)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(4, 12), (8, 6)])
@pytest.mark.sampled(1)
def test_errors_among_more_ranks(ranks: int, count: int) -> None:
    with World(ranks) as world:
        for place in places(count, list(TEXTS), seed=4, ranks=ranks):
            raised_by_all(world, place)


def at_the_end(rank: int, kind: str) -> list[str]:
    """Rank 1 fails in a call without gradients, after the last message of its pass; then calls."""
    model, ids = make("qwen2", num_hidden_layers=LAYERS), random_ids(1, TOKENS + 1)
    engine = oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8), mesh=meshes[2])

    def evaluate() -> None:
        if kind == "evaluate":
            engine.evaluate(ids, ids)
            return
        with torch.no_grad(), engine.two_pass(ids, ids):
            pass

    owner, name = (Call, "result") if kind == "evaluate" else (TwoPass, "_as_rows")
    before = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        before(*arguments)
        raise ZeroDivisionError("at the end")

    found = []
    for fails in (rank == 1, False):
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(owner, name, failing)
            try:
                evaluate()
                found.append("no error")
            except (ZeroDivisionError, oomb.Error) as error:
                found.append(str(error))
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["evaluate", "two passes"])
def test_an_error_after_the_last_message_is_raised_by_all(pair: World, kind: str) -> None:
    pair.start(at_the_end, kind)
    assert pair.answers() == [
        ["[rank 1] ZeroDivisionError: at the end", "no error"],
        ["at the end", "no error"],
    ]


def with_a_model_elsewhere(rank: int) -> str:
    ranks = Ranks([0, 1], torch.device("cpu"))
    try:
        device = torch.device("cpu" if rank == 0 else "meta")
        expect_own_device(ranks.collect, ranks.members, ranks.device, device)
    except ValueError as error:
        return str(error)
    finally:
        ranks.close()
    return "no error"


def test_a_model_on_another_device_is_refused_by_all(pair: World) -> None:
    text = "[rank 1] mesh: expected a mesh of the model's device type 'meta', got 'cpu'"
    assert pair.run(with_a_model_elsewhere) == [text, text]


class EndsAfterTheWait:
    """A collective that ends between the end of a wait for it and the next look at it."""

    def __init__(self, work: Any) -> None:
        self.work, self.has_ended = work, False

    def get_future(self) -> EndsAfterTheWait:
        return self

    def done(self) -> bool:
        return self.has_ended

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(LONGEST)
        if not self.has_ended:
            self.has_ended = True
            raise RuntimeError("Operation timed out!")


def with_waits_that_run_out(rank: int) -> bool:
    model = make("qwen2", num_hidden_layers=LAYERS)
    ids = random_ids(1, TOKENS + 1)
    engine = oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8), mesh=meshes[2])
    expected = gradients(engine, model, ids)
    wait = Ranks._wait_on_host
    Ranks._wait_on_host = lambda self, work: wait(self, EndsAfterTheWait(work))  # type: ignore[method-assign]
    try:
        found = gradients(engine, model, ids)
    finally:
        Ranks._wait_on_host = wait  # type: ignore[method-assign]
    engine.close()
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_wait_that_runs_out_is_no_failure(pair: World) -> None:
    assert pair.run(with_waits_that_run_out) == [True, True]


def borders_passed(rank: int) -> list[int]:
    """Before each border of the second rank, which is slow: how many the first has passed."""
    ranks, store = Ranks([0, 1], torch.device("cpu")), c10d._get_default_store()
    seen = []
    for number in range(1, BORDERS + 1):
        if rank == 1:
            deadline = time.monotonic() + LONGEST_SECONDS
            while store.add("borders", 0) < number and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)  # in which the first could pass more
            seen.append(store.add("borders", 0))
        ranks.border()
        if rank == 0:
            store.add("borders", 1)
    ranks.collect(lambda: None)
    ranks.close()
    return seen


def test_a_host_is_one_border_ahead_of_another_and_no_more(pair: World) -> None:
    assert pair.run(borders_passed) == [[], list(range(1, BORDERS + 1))]


def sums_under_a_profile(rank: int) -> float:
    ranks, total = Ranks([0, 1], torch.device("cpu")), 0.0
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with pytest.MonkeyPatch.context() as patch, torch.profiler.profile(), hooks:
        patch.setattr("oomb.parallel.group._LOOK", timedelta(milliseconds=1))
        for _ in range(SUMS):
            total += float(ranks.sum(torch.ones(1)))
    ranks.close()
    return total


def test_a_profile_with_hooks_of_saved_tensors_stops_no_rank(pair: World) -> None:
    """What ends a collective then takes Python's lock while it holds the collective's."""
    pair.start(sums_under_a_profile)
    assert pair.answers(seconds=LONGEST_SECONDS) == [2.0 * SUMS] * 2


def test_only_processes_of_this_host_are_seen_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another host may have the same name and the same space of process numbers."""
    own = host, space, _ = peers.place_of_this()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert peers.first_ended([own, (host, space, child.pid)]) == 1
    (tmp_path / "boot_id").write_text("of another host")
    with monkeypatch.context() as there:
        there.setattr(peers, "_BOOT", str(tmp_path / "boot_id"))
        other, *_ = peers.place_of_this()
    assert peers.first_ended([own, (other, space, child.pid)]) is None


def left_behind(place: Place) -> None:
    with World(place.ranks) as world:
        world.start(call, place)
        answers = world.answers(seconds=LONGEST_SECONDS * place.ranks / 2)
    assert isinstance(answers.pop(place.rank), Died), answers
    gone = (f"rank {place.rank} has ended", "a rank of the sequence has ended", "does not answer")
    for text, kept, _ in answers:
        assert any(words in text for words in gone), text
        assert kept


@pytest.mark.parametrize(
    "place",
    [
        Place("sweep", 1, 1, 1, "SIGKILL"),
        Place("backward", 0, 2, 0, "SIGTERM"),
        Place("loss", 0, 0, 1, "SIGKILL", passes=2),
    ],
    ids=str,
)
def test_the_others_do_not_wait_for_a_rank_that_is_gone(place: Place) -> None:
    left_behind(place)


@pytest.mark.slow
def test_ranks_that_are_gone_anywhere() -> None:
    drawn = places(6, ["SIGKILL", "SIGTERM"], seed=3)
    for place in [*drawn, *(x for n in (4, 8) for x in places(2, ["SIGKILL"], seed=5, ranks=n))]:
        left_behind(place)
