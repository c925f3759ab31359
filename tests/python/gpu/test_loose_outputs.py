"""Kept outputs in torch's memory: the bits and the memory of a step on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import gradients
from peft import LoraConfig, get_peft_model

import oomb
from engine.models import VOCABULARY, of

pytestmark = pytest.mark.gpu
_SIZES = {"head_dim": 64, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma3": {"config": "Gemma3TextConfig", "sliding_window": 4096},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 200},
    "Qwen3Moe": _EXPERTS,
}
CHUNK, CHUNKS = 512, 24
MIB = 2**20


def step(model: Any, **settings: Any) -> tuple[oomb.Step, dict[str, torch.Tensor], int]:
    """A second step, its gradients, and the most that torch held in it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, CHUNK * CHUNKS), generator=generator).cuda()
    config = oomb.Config(chunk_size=CHUNK, page_size=64, device_memory="4GiB", **settings)
    with oomb.Engine(model, config) as engine:
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = engine.forward_backward(ids, ids)
            torch.cuda.synchronize()
    return found, gradients(model), torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_nothing_kept(family: str, adapted: bool) -> None:
    torch.manual_seed(0)
    model: Any = of(family, **{**_SIZES, **FAMILIES[family]}).to("cuda", torch.bfloat16)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    plain, expected, _ = step(model, recompute="none", keep_outputs="none")
    bare, _, least = step(model, recompute="layer", keep_outputs="none")
    loose, found, most = step(model, recompute="layer", keep_outputs="all")
    assert len(loose.stats.recomputed) > 1, loose.stats.recomputed
    assert loose.stats.device_peak_bytes == bare.stats.device_peak_bytes
    assert torch.equal(loose.loss, plain.loss)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    # Never more than that of a step without, and what is kept.
    assert most <= least + loose.stats.kept_output_bytes + 8 * MIB
