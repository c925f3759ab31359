"""Heads of a size that no fast kernel takes run on fast ones, with zeros behind them."""

from __future__ import annotations

import pytest
import torch
from engine_case import chunked, gradients, make_model, tokens

import oomb
from engine.reference import relative_error
from oomb import _C
from oomb.model.layer_shape import compute_capability

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [40, 72, 80, 112, 192, 320])
def test_bf16_is_as_far_from_fp32_as_ordinary_training(head_dim: int) -> None:
    capability = compute_capability(torch.device("cuda"))
    assert capability is not None
    padded = _C.attention_head_dim(head_dim, capability)
    if padded == head_dim:
        pytest.skip(f"no kernel takes heads of {head_dim} or up to twice that on {capability / 10}")
    ids = tokens()
    exact, model = make_model(torch.float32, head_dim), make_model(torch.bfloat16, head_dim)
    exact.load_state_dict(model.state_dict())
    exact(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    expected, beside = gradients(exact), gradients(model)
    with oomb.Engine(model, oomb.Config(chunk_size=256, page_size=64)) as engine:
        assert {s.head_dim for s in engine._shapes} == {padded}
    # Which raises where these do not take a call.
    _C.force_attention("sm90" if capability // 10 == 9 and padded not in (96, 512) else "sm80")
    try:
        _, found = chunked(model, ids)
    finally:
        _C.force_attention(None)
    for name, gradient in expected.items():
        limit = 2 * relative_error(beside[name], gradient) + 1e-4
        assert relative_error(found[name], gradient) < limit, name
