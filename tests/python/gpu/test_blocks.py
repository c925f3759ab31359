"""Llama 4's layers of blocks on a GPU: first keys that change inside a chunk, beside windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import VOCABULARY, chunked, gradients, tokens
from transformers import Llama4ForCausalLM, Llama4TextConfig

pytestmark = pytest.mark.gpu

BLOCK = 300  # no multiple of a tile; blocks end inside chunks of 256


def make_model(dtype: torch.dtype, head_dim: int, device: str = "cuda") -> Any:
    """Without experts, whose router rounding could flip."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * head_dim,
        intermediate_size=512,
        intermediate_size_mlp=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        moe_layers=[],
        num_local_experts=1,
        attention_chunk_size=BLOCK,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        floor_scale=100,
        attn_scale=0.5,
        pad_token_id=0,
    )
    return Llama4ForCausalLM(config).to(device=device, dtype=dtype).eval()


def ordinary(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return gradients(model)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bf16_error_is_at_most_twice_that_of_ordinary_training(head_dim: int) -> None:
    """On tensor cores; the reference is in fp64, with the same weights."""
    ids, model = tokens(batch=2), make_model(torch.bfloat16, head_dim)
    exact = make_model(torch.float64, head_dim)
    with torch.no_grad():
        for a, b in zip(exact.parameters(), model.parameters(), strict=True):
            a.copy_(b)
    expected, usual = ordinary(exact, ids), ordinary(model, ids)
    _, ours = chunked(model, ids)
    for name, value in expected.items():
        error, limit = error_of(ours[name], value), 2 * error_of(usual[name], value)
        assert error <= limit, (name, error, limit)


def test_fp32_equals_ordinary_training() -> None:
    ids, model = tokens(), make_model(torch.float32, 64)
    expected = ordinary(model, ids)
    _, ours = chunked(model, ids)
    for name, value in expected.items():
        assert error_of(ours[name], value) < 1e-4, name


def test_tiers_change_no_bit() -> None:
    ids, model = tokens(), make_model(torch.bfloat16, 64)
    _, whole = chunked(model, ids)
    step, tight = chunked(model, ids, device_memory="512KiB", host_memory="64MiB")
    assert step.stats.h2d_bytes > 0
    assert all(torch.equal(tight[name], value) for name, value in whole.items())
