"""A process forked from an engine's own leaves the engine alone, and can have one of its own."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import oomb

from .children import SECONDS, exit_code_of_child
from .models import make
from .programs import run_program
from .recovery import IDS, SPARSE, config, usual
from .reference import assert_identical


def in_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a forked process; it must succeed."""
    assert exit_code_of_child(work) == 0


@pytest.fixture
def engine() -> Any:
    """Of pages that travel, whose copies have threads."""
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        engine.forward_backward(IDS, IDS)
        model.zero_grad()
        yield engine


def test_a_child_closes_it(engine: oomb.Engine) -> None:
    in_child(engine.close)
    engine.forward_backward(IDS, IDS)


def test_a_child_leaves_its_context(engine: oomb.Engine) -> None:
    def leave() -> None:
        with engine:
            pass

    in_child(leave)
    engine.forward_backward(IDS, IDS)


def test_a_child_lets_go_of_it() -> None:
    model = make("llama")
    kept = [oomb.Engine(model, config(model))]
    kept[0].forward_backward(IDS, IDS)
    in_child(kept.clear)
    assert kept
    kept[0].forward_backward(IDS, IDS)


@pytest.mark.parametrize("call", ["forward_backward", "evaluate"])
def test_a_child_is_told_why_it_cannot_call(engine: oomb.Engine, call: str) -> None:
    own = os.getpid()

    def try_it() -> None:
        with pytest.raises(oomb.Error, match=rf"engine: expected a call in process {own}, which"):
            getattr(engine, call)(IDS, IDS)
        with pytest.raises(
            oomb.Error, match=rf"in process {own}, .* process {os.getpid()}, forked"
        ):
            engine.plan(100)
        with pytest.raises(oomb.Error, match=rf"page manager belongs to process {own}"):
            engine.snapshot()

    in_child(try_it)
    engine.forward_backward(IDS, IDS)


@pytest.mark.parametrize("settings", [{}, {"attention": SPARSE}], ids=["exact", "sparse"])
def test_a_child_has_an_engine_of_its_own(engine: oomb.Engine, settings: dict[str, Any]) -> None:
    model = make("llama")
    with oomb.Engine(model, config(model, **settings)) as own:
        expected = usual(own, model)

    def train() -> None:
        with oomb.Engine(model, config(model, **settings)) as own:
            assert_identical(usual(own, model), expected)

    in_child(train)


def test_forked_while_another_thread_is_in_a_call(engine: oomb.Engine) -> None:
    """In the child that call never ends, and is not in the way of another one."""
    model = make("llama")
    with oomb.Engine(model, config(model)) as own:
        expected = usual(own, model)

    def train() -> None:
        engine.close()
        with oomb.Engine(model, config(model)) as own:
            assert_identical(usual(own, model), expected)

    begun, go_on = threading.Event(), threading.Event()

    def wait(_: oomb.Progress) -> None:
        begun.set()
        go_on.wait(SECONDS)

    thread = threading.Thread(
        target=lambda: engine.forward_backward(IDS, IDS, on_progress=wait), daemon=True
    )
    thread.start()
    assert begun.wait(SECONDS)
    try:
        in_child(train)
    finally:
        go_on.set()
        thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_child_that_ends_as_a_program_does(engine: oomb.Engine) -> None:
    """Through Python's own exit, where its objects are collected."""
    program = (
        "import os, sys, torch, oomb\n"
        "from tests.python.engine.children import ended\n"
        "from tests.python.engine.test_fork import IDS, config, make\n"
        "torch.set_num_threads(1)\n"
        "model = make('llama')\n"
        "engine = oomb.Engine(model, config(model))\n"
        "engine.forward_backward(IDS, IDS)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    code = ended(child)\n"
        "    engine.close()\n"
        "    sys.exit(9 if code is None else code)\n"
    )
    assert run_program(program) == (0, "")


class Rows(Dataset[torch.Tensor]):
    """A data set that holds an engine, and lets go of it in a worker."""

    def __init__(self, engine: oomb.Engine) -> None:
        self.engine: oomb.Engine | None = engine

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.engine = None
        gc.collect()
        return torch.tensor(index)


def test_a_data_loaders_worker_lets_go_of_it() -> None:
    model = make("llama")
    engine = oomb.Engine(model, config(model))
    engine.forward_backward(IDS, IDS)
    rows = Rows(engine)
    loader = DataLoader(rows, num_workers=1, timeout=SECONDS, multiprocessing_context="fork")
    assert [int(row) for row in loader] == [0, 1, 2, 3]
    engine.forward_backward(IDS, IDS)
    engine.close()
