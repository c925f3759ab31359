"""The chunk that is being run is a value: each graph keeps its own, whatever runs meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn

import oomb
from oomb.core.attention import ChunkAttention
from oomb.core.attention_operation import chunk_attention
from oomb.core.chunk_run import ChunkRun, current_run
from oomb.core.loop import ChunkLoop
from oomb.core.recompute import LayerRunner

from .models import make
from .recurrent_models import make_recurrent
from .reference import random_ids

CALL = -7  # no engine's
FILL, SWEEP = ChunkRun(3, "fill"), ChunkRun(5, "sweep")


def in_a_bare_thread(work: Callable[[], object]) -> None:
    """As autograd runs the backward of what lies on a GPU: without the caller's context."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class NotedAttention:
    """In place of attention: the queries, and which chunk it was asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ChunkRun]] = []

    def forward(self, run: ChunkRun, layer: int, q: torch.Tensor, *_: Any) -> Any:
        self.seen.append(("forward", run))
        return q.clone(), q.new_zeros(q.shape[:3])

    def backward(self, run: ChunkRun, layer: int, *tensors: Any) -> Any:
        self.seen.append(("backward", run))
        return *tensors[:3], None


def test_backward_is_that_of_the_chunk_whose_forward_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = NotedAttention()
    monkeypatch.setitem(ChunkAttention.active, CALL, noted)  # type: ignore[arg-type]
    outputs = []
    for run in (FILL, SWEEP):
        q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
        with run.under_way():
            outputs.append(chunk_attention(q, k, v, None, 1.0, 0.0, 0, CALL, 0)[0])
    in_a_bare_thread(lambda: outputs[0].sum().backward())
    with FILL.under_way():
        outputs[1].sum().backward()
    expected = [("forward", FILL), ("forward", SWEEP), ("backward", FILL), ("backward", SWEEP)]
    assert noted.seen == expected


def test_a_layer_computed_again_is_of_its_own_chunk() -> None:
    """And draws what it drew, though another chunk is being run."""
    runner = LayerRunner(recompute="layer", seed=11)
    seen: list[ChunkRun] = []
    drawn: list[torch.Tensor] = []
    layer = nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(current_run())
        drawn.append(torch.rand(3))
        return layer(x).tanh()

    with SWEEP.under_way():
        output = runner(0, forward, (torch.ones(1, 4, requires_grad=True),), {})
    with FILL.under_way():
        in_a_bare_thread(lambda: output.sum().backward())
        assert current_run() is FILL
    assert seen == [SWEEP, SWEEP]
    assert torch.equal(*drawn)


def test_nothing_changes_it() -> None:
    with pytest.raises(FrozenInstanceError):
        FILL.chunk = 4  # type: ignore[misc]
    with pytest.raises(AssertionError):
        current_run()
    with suppress(KeyError), FILL.under_way():
        with SWEEP.under_way():
            assert current_run() is SWEEP
        assert current_run() is FILL
        raise KeyError
    with pytest.raises(AssertionError):
        current_run()


class NotedCarry:
    """Hands on nothing, and notes around which chunks it stands."""

    def __init__(self) -> None:
        self.runs: list[ChunkRun] = []

    @contextmanager
    def on(self, run: ChunkRun) -> Iterator[None]:
        assert current_run() is run
        self.runs.append(run)
        yield

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [], []


@pytest.mark.parametrize(("kind", "ends_with"), [("llama", "pages"), ("lfm2", None)])
def test_every_carry_is_told_of_every_chunk(
    kind: str, ends_with: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_it = make if kind == "llama" else make_recurrent
    model = make_it(kind, torch.float32)
    noted = NotedCarry()
    init = ChunkLoop.__init__

    def with_another(self: ChunkLoop, *arguments: Any) -> None:
        init(self, *arguments)
        self._carries = (*self._carries, noted)

    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        if ends_with is None:
            ends_with = "states" if engine._model.ends_in_mixer else "pages"
        monkeypatch.setattr(ChunkLoop, "__init__", with_another)
        ids = random_ids(1, 48)
        engine.forward_backward(ids, ids)
        swept = [(chunk, "sweep", None) for chunk in (2, 1, 0)]
        found = [(run.chunk, run.phase, run.ends_with) for run in noted.runs]
        assert found == [(0, "fill", ends_with), (1, "fill", ends_with), *swept]
        noted.runs.clear()
        engine.evaluate(ids, ids)
        assert noted.runs == [ChunkRun(chunk, "fill") for chunk in range(3)]
