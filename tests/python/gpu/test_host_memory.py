"""What the host keeps for a GPU, optimizer states and gradient sums: same bits as on the device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import oomb
from oomb.optim import HostStates, host_states

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
IDS = torch.randint(1, 1000, (1, 4096), generator=torch.Generator().manual_seed(1))


def _model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(SHAPE).bfloat16().cuda().train()


def _trained(
    make: Any, on_host: bool, steps: int = 3, **settings: Any
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, parameters on the host, and the most that torch held while the optimizer stepped."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = _model()
    optimizer: torch.optim.Optimizer = make(model.parameters())
    if on_host:
        optimizer = HostStates(optimizer, free_gradients=True)
    losses, most = [], 0
    with oomb.Engine(model, oomb.Config(chunk_size=512, **settings)) as engine:
        for _ in range(steps):
            losses.append(float(engine.forward_backward(IDS.cuda(), IDS.cuda()).loss))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            optimizer.zero_grad()
            most = torch.cuda.max_memory_allocated() - before
    return losses, [p.detach().cpu() for p in model.parameters()], most


def _adamw8bit(parameters: Any) -> torch.optim.Optimizer:
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.AdamW8bit(parameters, lr=1e-3)  # type: ignore[no-any-return]


@pytest.mark.parametrize("part_bytes", [2**20, 2**28])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        _adamw8bit,
    ],
    ids=["fused", "foreach", "8 bits"],
)
def test_states(make: Any, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "_PART_BYTES", part_bytes)
    losses, parameters, most = _trained(make, on_host=False)
    ours, trained, less = _trained(make, on_host=True)
    assert ours == losses
    assert all(torch.equal(one, other) for one, other in zip(trained, parameters, strict=True))
    if part_bytes < 2**28:
        assert less < most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_sums(dtype: str, recompute: str) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for place in ("device", "host"):
        model = _model()
        config = oomb.Config(
            chunk_size=512,
            main_grad_dtype=dtype,  # type: ignore[arg-type]
            main_grad_device=place,  # type: ignore[arg-type]
            recompute=recompute,  # type: ignore[arg-type]
        )
        with oomb.Engine(model, config) as engine:
            for _ in range(2):
                model.zero_grad()
                engine.forward_backward(IDS.cuda(), IDS.cuda())
        found[place] = [p.grad for p in model.parameters() if isinstance(p, nn.Parameter)]
    assert all(torch.equal(a, b) for a, b in zip(found["device"], found["host"], strict=True))


def test_sums_with_pages_that_spill() -> None:
    """Their copies share the link."""
    found = []
    for place in ("device", "host"):
        model = _model()
        config = oomb.Config(chunk_size=512, device_memory="12MiB", main_grad_device=place)  # type: ignore[arg-type]
        with oomb.Engine(model, config) as engine:
            engine.forward_backward(IDS.cuda(), IDS.cuda())
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
