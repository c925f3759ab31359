"""Heads of a size that no fast kernel takes run on fast ones, with zeros behind them."""

from __future__ import annotations

import pytest
import torch
from engine_case import chunked, gradients, make_model, tokens

import oomb
from engine.reference import relative_error
from oomb import _C

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("head_dim", "kernels"),
    [(40, "sm90"), (72, "sm80"), (80, "sm80"), (112, "sm90"), (192, "sm90")],
)
def test_bf16_is_as_far_from_fp32_as_ordinary_training(head_dim: int, kernels: str) -> None:
    ids = tokens()
    exact, model = make_model(torch.float32, head_dim), make_model(torch.bfloat16, head_dim)
    exact.load_state_dict(model.state_dict())
    exact(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    expected, beside = gradients(exact), gradients(model)
    with oomb.Engine(model, oomb.Config(chunk_size=256, page_size=64)) as engine:
        assert {s.head_dim for s in engine._shapes} == {_C.attention_head_dim(head_dim, 90)}
    _C.force_attention(kernels)  # which raises where these do not take a call
    try:
        _, found = chunked(model, ids)
    finally:
        _C.force_attention(None)
    for name, gradient in expected.items():
        limit = 2 * relative_error(beside[name], gradient) + 1e-4
        assert relative_error(found[name], gradient) < limit, name
