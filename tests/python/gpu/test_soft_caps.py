"""Gemma 2's soft caps, windows and head dims in bf16, on the kernels for every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_case import gradients

import oomb
from engine.models import VOCABULARY, make
from engine.reference import relative_error
from oomb import _C

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """Another call raises."""
    _C.force_attention("sm80")
    yield
    _C.force_attention(None)


@pytest.mark.parametrize("rule", [oomb.Dense(), oomb.TopKPages(budget=100)], ids=["dense", "pages"])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_as_near_as_ordinary_training(name: str, head_dim: int, rule: Any) -> None:
    """Budgets above the number of pages list them all."""
    model, exact = (
        make(name, dtype, head_dim=head_dim, sliding_window=200).to("cuda")
        for dtype in (torch.bfloat16, torch.float32)
    )
    exact.load_state_dict(model.state_dict())
    for ordinary in (model, exact):
        ordinary.set_attn_implementation("eager")
    ids = torch.randint(VOCABULARY, (1, 1500), device="cuda")
    exact(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    expected, beside = gradients(exact), gradients(model)
    model.zero_grad()
    config = oomb.Config(chunk_size=256, page_size=64, attention=rule)
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids, ids)
    found = gradients(model)
    for key, gradient in expected.items():
        limit = 2 * relative_error(beside[key], gradient) + 1e-4
        assert relative_error(found[key], gradient) < limit, key
