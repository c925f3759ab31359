"""A small model whose linear layers are torchao's in float8, and what its gradients must be."""

from __future__ import annotations

import copy
from typing import Any

import torch

import oomb
from engine.models import VOCABULARY, make
from engine.reference import relative_error, take_gradients
from oomb.model.float8 import RECIPE, convert_linears


def expect_as_near_as_torchao(
    device: str, dtype: torch.dtype, *, recompute: str = "none", emulate: bool = False
) -> None:
    """To gradients in fp32: the engine's in chunks, and those of one pass through torchao's layers.

    Weights are values of bf16 in every case. Buffers keep their dtype: angles in bf16 would make
    errors of both so large that nothing else shows.
    """
    exact: Any = make("qwen2", torch.bfloat16, hidden_size=256, intermediate_size=512).to(device)
    model = copy.deepcopy(exact)
    exact.float()
    if dtype != torch.bfloat16:
        model.to(dtype)
    convert_linears(model, RECIPE, emulate=emulate)
    own = copy.deepcopy(model)
    ids = torch.randint(VOCABULARY, (1, 500), device=device)
    for ordinary in (exact, own):
        ordinary(input_ids=ids, labels=ids).loss.backward()
    expected, theirs = take_gradients(exact), take_gradients(own)
    config = oomb.Config(chunk_size=128, page_size=64, recompute=recompute)  # type: ignore[arg-type]
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids, ids)
    for name, gradient in take_gradients(model).items():
        limit = 1.5 * relative_error(theirs[name], expected[name]) + 1e-3
        error = relative_error(gradient, expected[name])
        assert error < limit, (name, error, limit)
