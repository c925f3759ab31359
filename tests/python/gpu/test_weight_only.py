"""Bases of torchao on a GPU: gradients of its own training, and codes on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import oomb

logging.getLogger("torchao").setLevel(logging.ERROR)
ao = pytest.importorskip("torchao.quantization")
nf4_api = pytest.importorskip("torchao.prototype._nf4tensor_api")
mx_formats = pytest.importorskip("torchao.prototype.mx_formats.inference_workflow")
pytestmark = pytest.mark.gpu

SHAPE = LlamaConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=8192,
)
IDS = torch.randint(1, 1000, (1, 1500), generator=torch.Generator().manual_seed(1))
CONFIG = oomb.Config(chunk_size=512, recompute="none")
FORMATS: dict[str, Callable[[], Any]] = {
    "int8": ao.Int8WeightOnlyConfig,
    "float8": ao.Float8WeightOnlyConfig,
    "nf4": nf4_api.NF4WeightOnlyConfig,
    "nvfp4": mx_formats.NVFP4WeightOnlyConfig,
}


def _adapted(kind: str, dtype: torch.dtype) -> Any:
    """On the CPU, where the same weights get the same codes."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(SHAPE).to(dtype)
    ao.quantize_(base.model, FORMATS[kind]())
    model: Any = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_and_memory(kind: str) -> None:
    """Of its own training, which keeps the unpacked weights of all layers, but in NF4; to unpack a
    weight in NVFP4 takes much more than its values meanwhile."""
    model, ids = _adapted(kind, torch.float32).cuda(), IDS.cuda()
    before = torch.cuda.memory_allocated()
    with oomb.Engine(model, CONFIG) as engine:
        torch.cuda.reset_peak_memory_stats()
        step = engine.forward_backward(ids, ids)
        ours_peak = torch.cuda.max_memory_allocated() - before
    ours = _gradients(model)
    chunk = IDS[:, :512].cuda()
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=chunk, labels=chunk, use_cache=False).loss.backward()
    their_peak = torch.cuda.max_memory_allocated() - before
    _gradients(model)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    theirs = _gradients(model)
    assert float(step.loss) == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-4, name
    unpacked = 4 * 6 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 4096 * 1024)
    assert ours_peak < their_peak - (unpacked / 2 if kind in ("int8", "float8") else 0)


def test_codes_on_the_host_change_no_bit() -> None:
    found = []
    for weights in ("device", "host"):
        model = _adapted("int8", torch.bfloat16)
        if weights == "device":
            model = model.cuda()
        config = oomb.Config(chunk_size=512, weights=weights)  # type: ignore[arg-type]
        with oomb.Engine(model, config) as engine:
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                step = engine.forward_backward(IDS.cuda(), IDS.cuda())
        found.append((float(step.loss), _gradients(model)))
    (loss, expected), (ours, gradients) = found
    assert loss == ours and expected.keys() == gradients.keys()
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())
    assert step.stats.fetched_weight_bytes > 6 * 14 * 2**20
    assert (
        0
        <= step.stats.exposed_weight_seconds
        < step.stats.fill_seconds + (step.stats.sweep_seconds)
    )
