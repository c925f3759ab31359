"""Gemma 4's classes of layers at their released head dims: 256 in windows, 512 in global layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_case import gradients

import oomb
from engine import layer_classes
from engine.models import VOCABULARY
from engine.reference import relative_error
from oomb import _C

pytestmark = pytest.mark.gpu
SIZES = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 200}


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """The kernels that take both head dims; another call raises."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("heads of 512 have fast kernels since compute capability 9.0")
    _C.force_attention("sm80")
    yield
    _C.force_attention(None)


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-e2b"])
def test_as_near_as_ordinary_training(name: str) -> None:
    model = layer_classes.make(name, torch.bfloat16, **SIZES).to("cuda")
    exact = layer_classes.make(name, torch.float32, **SIZES).to("cuda")
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(VOCABULARY, (1, 1500), device="cuda")
    exact(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    expected, beside = gradients(exact), gradients(model)
    found = []
    for memory in ({}, {"device_memory": "2MiB", "host_memory": "1GiB"}):
        model.zero_grad()
        config = oomb.Config(chunk_size=256, page_size=64, **memory)  # type: ignore[arg-type]
        with oomb.Engine(model, config) as engine:
            step = engine.forward_backward(ids, ids)
        found.append(gradients(model))
    assert step.stats.h2d_bytes > 0
    for key, gradient in expected.items():
        limit = 2 * relative_error(beside[key], gradient) + 1e-4
        assert relative_error(found[0][key], gradient) < limit, key
        assert torch.equal(found[0][key], found[1][key]), key
