"""An interrupt and a forked process, where copies and page-locked memory are under way."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from engine_case import CHUNK, PAGE, gradients, make_model, tokens

import oomb
from engine.children import exit_code_of_child

pytestmark = pytest.mark.gpu


def spilling(**settings: Any) -> oomb.Config:
    """Pinned host memory grows in a thread, and pages travel."""
    slot = 2 * PAGE * 64 * 2  # K and V of one head, bf16
    return oomb.Config(
        chunk_size=CHUNK,
        page_size=PAGE,
        device_memory=30 * slot,
        host_memory="256MiB",
        deterministic=True,
        **settings,
    )


@pytest.mark.parametrize("attention", [oomb.Dense(), oomb.TopKPages(budget=4)], ids=str)
def test_a_forked_process_leaves_it_alone(attention: Any) -> None:
    model, ids = make_model(torch.bfloat16), tokens()
    kept = [oomb.Engine(model, spilling(attention=attention))]
    kept[0].forward_backward(ids, ids)
    expected = gradients(model)

    def call_and_let_go() -> None:
        with pytest.raises(oomb.Error, match="forked from it"):
            kept[0].forward_backward(ids, ids)
        kept[0].close()
        kept.clear()

    assert exit_code_of_child(kept[0].close) == 0
    assert exit_code_of_child(kept.clear) == 0
    assert exit_code_of_child(call_and_let_go) == 0
    model.zero_grad()
    kept[0].forward_backward(ids, ids)
    assert all(torch.equal(x, expected[name]) for name, x in gradients(model).items())
    kept[0].close()


@pytest.mark.parametrize("phase", ["fill", "sweep"])
def test_after_ctrl_c_the_next_call_has_the_usual_bits(phase: str) -> None:
    model, ids = make_model(torch.bfloat16), tokens()
    device = torch.cuda.current_device()
    with oomb.Engine(model, spilling()) as engine:
        engine.forward_backward(ids, ids)
        expected = gradients(model)
        model.zero_grad()

        def stop(progress: oomb.Progress) -> None:
            if progress.phase == phase and progress.chunk == 2:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(ids, ids, on_progress=stop)
        assert all(p.grad is None for p in model.parameters())
        assert torch.cuda.current_device() == device
        engine.forward_backward(ids, ids)
        assert all(torch.equal(x, expected[name]) for name, x in gradients(model).items())
