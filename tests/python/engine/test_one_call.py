"""One call at a time: a second one, or a close, takes nothing from the one under way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import oomb

from .models import make
from .recovery import IDS, assert_untouched, config, usual, with_gradients
from .reference import Result, assert_identical, take_gradients


def test_a_call_inside_a_call_is_refused() -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        with pytest.raises(RuntimeError, match="one call at a time"):
            engine.forward_backward(
                IDS, IDS, on_progress=lambda _: engine.evaluate(IDS, IDS) and None
            )
        assert_untouched(engine, model, before, expected)


class NothingAtFirst(oomb.SampledChunks):
    """All chunks; none where a test says so."""

    nothing = False

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return [] if NothingAtFirst.nothing else list(range(num_chunks))


def again(engine: oomb.Engine) -> None:
    engine.forward_backward(IDS, IDS)


def draws_nothing(engine: oomb.Engine) -> None:
    NothingAtFirst.nothing = True
    try:
        engine.forward_backward(IDS, IDS)
    finally:
        NothingAtFirst.nothing = False


def two_passes(engine: oomb.Engine) -> None:
    with engine.two_pass(IDS, IDS) as call:
        call.logprobs.sum().backward()
        call.sweep()


def plans(engine: oomb.Engine) -> None:
    engine.plan(100)


@pytest.mark.parametrize("place", [("fill", 3), ("sweep", 4), ("sweep", 0)], ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
@pytest.mark.parametrize("other", [again, draws_nothing, two_passes, plans])
@pytest.mark.sampled(8)
def test_a_call_that_is_refused_takes_nothing_from_the_one_under_way(
    other: Callable[[oomb.Engine], None], beside: bool, place: tuple[str, int]
) -> None:
    model = make("llama")
    with oomb.Engine(model, config(model, backward=NothingAtFirst(keep=1.0))) as engine:
        expected = usual(engine, model)
        refused: list[str] = []

        def refuse() -> None:
            with pytest.raises(oomb.Error) as caught:
                other(engine)
            refused.append(str(caught.value))

        def report(progress: oomb.Progress) -> None:
            if (progress.phase, progress.chunk) != place:
                return
            if beside:
                thread = threading.Thread(target=refuse)
                thread.start()
                thread.join()
            else:
                refuse()

        step = engine.forward_backward(IDS, IDS, on_progress=report)
        assert refused == ["engine: expected one call at a time, got one inside or beside another"]
        assert_identical(Result(step.loss, take_gradients(model)), expected)
        assert_identical(usual(engine, model), expected)


def test_a_sweep_inside_another_call_is_refused() -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        with engine.two_pass(IDS, IDS) as call:
            call.logprobs.sum().backward()

            def sweep(progress: oomb.Progress) -> None:
                if (progress.phase, progress.chunk) == ("sweep", 0):
                    with pytest.raises(oomb.Error, match="one call at a time"):
                        call.sweep()

            step = engine.forward_backward(IDS, IDS, on_progress=sweep)
            assert_identical(Result(step.loss, take_gradients(model)), expected)
            call.sweep()  # it still can


@pytest.mark.parametrize("place", [("fill", 0), ("sweep", 4), ("sweep", 0)], ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_a_close_waits_for_the_end_of_the_call(beside: bool, place: tuple[str, int]) -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)

        def close(progress: oomb.Progress) -> None:
            if (progress.phase, progress.chunk) != place:
                return
            if beside:
                thread = threading.Thread(target=engine.close)
                thread.start()
                thread.join()
            else:
                engine.close()

        step = engine.forward_backward(IDS, IDS, on_progress=close)
        assert_identical(Result(step.loss, take_gradients(model)), expected)
        assert engine._pools.manager is None
        with pytest.raises(oomb.Error, match="expected an open engine"):
            engine.evaluate(IDS, IDS)


class ClosesAtTheDraw(oomb.SampledChunks):
    """Another thread closes an engine while its call is prepared."""

    engine: oomb.Engine | None = None

    def draw(self, num_chunks: int, step: int) -> list[int]:
        if ClosesAtTheDraw.engine is not None:
            thread = threading.Thread(target=ClosesAtTheDraw.engine.close)
            thread.start()
            thread.join()
        return list(range(num_chunks))


def test_a_call_whose_engine_is_closed_before_it_begins() -> None:
    model = make("llama")
    with oomb.Engine(model, config(model, backward=ClosesAtTheDraw(keep=1.0))) as engine:
        again(engine)
        ClosesAtTheDraw.engine = engine
        try:
            before = with_gradients(model)
            with pytest.raises(oomb.Error, match="expected an open engine"):
                again(engine)
        finally:
            ClosesAtTheDraw.engine = None
        assert engine._pools.manager is None
        assert all(p.grad is before[name] for name, p in model.named_parameters())
