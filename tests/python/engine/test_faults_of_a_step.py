"""Each call of the page manager fails, in a step whose pages and kept outputs spill."""

from __future__ import annotations

import pytest

import oomb
from fault_places import Parts, calls_by_place, failing_call

from .models import make
from .recovery import IDS, SPARSE, assert_untouched, config, usual, with_gradients

pytestmark = pytest.mark.slow


def test_any_failing_method_leaves_gradients_and_the_next_step() -> None:
    """In each part each method: its first call does nothing, or its last one fails when done."""
    model = make("llama")
    with oomb.Engine(model, config(model, attention=SPARSE, keep_outputs="all")) as engine:
        expected = usual(engine, model)

        def step(parts: Parts | None = None) -> oomb.Step:
            engine._pools.close()
            return engine.forward_backward(IDS, IDS, on_progress=parts)

        def recorded(parts: Parts) -> None:
            stats = step(parts).stats
            assert stats.kept_output_share == 1
            assert stats.d2h_bytes > 0 and stats.h2d_bytes > 0

        places = calls_by_place(recorded)
        methods = {place.method for place in places}
        assert {"__init__", "begin_call", "create", "write_output", "read_output"} <= methods
        assert {"acquire", "acquire_gradients", "drop", "end_call"} <= methods
        failed = 0
        for place, numbers in places.items():
            for number, done in ((numbers[0], False), (numbers[-1], True)):
                before = with_gradients(model)
                with (
                    failing_call(number, oomb.Error(f"failed in {place}"), done),
                    pytest.raises(oomb.Error, match="failed in"),
                ):
                    step()
                failed += 1
                if engine._pools.manager is None:  # never made, or left to its end
                    assert place.method in ("__init__", "end_call")
                    engine.evaluate(IDS, IDS)
                assert_untouched(engine, model, before, expected)
        assert failed > 40
