"""Models whose attention does not go through transformers' interface are planned as they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from engine.own_code_models import OWN_CODE, make_own_code
from engine.test_own_code import ALIBI, REFUSED
from oomb.plan import Machine, Planner

from .allocations import peak_allocated


@pytest.mark.parametrize("name", OWN_CODE)
def test_memory_of_a_call(name: str) -> None:
    """Torch's own allocations of one call, counted block by block."""
    tokens = 1025
    config = oomb.Config(chunk_size=256, page_size=32, recompute="none")
    model: Any = make_own_code(name, torch.float32)
    ids = torch.randint(97, (1, tokens))
    predicted = Planner(model, Machine.here("cpu")).predict(
        tokens, config, optimizer=None, timed=False
    )
    with oomb.Engine(model, config) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    made = predicted.call_bytes - (tokens - 1) * 3 * 8 + predicted.list_bytes
    assert made == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("build", "layer"), REFUSED)
def test_alibi_is_refused_by_its_name(build: Any, layer: str) -> None:
    with pytest.raises(oomb.UnsupportedModelError, match=f"{layer}: {ALIBI}"):
        Planner(build().config, Machine.here("cpu"))
