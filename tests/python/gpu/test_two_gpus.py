"""A model on a GPU that is not the current one, alone and beside another engine."""

from __future__ import annotations

import pytest
import torch
from engine_case import CHUNK, PAGE, chunked, make_model, tokens

import oomb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SLOT = 2 * PAGE * 64 * 2
TIERS = {
    "in HBM": {},
    "two tiers": {"device_memory": 40 * SLOT, "host_memory": "64MiB"},
}


@pytest.mark.parametrize("memory", TIERS.values(), ids=TIERS.keys())
@pytest.mark.parametrize(
    "attention", [oomb.Dense(), oomb.TopKPages(budget=4)], ids=["dense", "topk"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_second_gpu_has_the_bits_of_the_first(
    dtype: torch.dtype, attention: oomb.Dense | oomb.TopKPages, memory: dict[str, object]
) -> None:
    settings = {"attention": attention, **memory}
    first, expected = chunked(make_model(dtype), tokens(), **settings)
    held = torch.cuda.memory_allocated(0)
    assert torch.cuda.current_device() == 0
    step, ours = chunked(make_model(dtype, device="cuda:1"), tokens(device="cuda:1"), **settings)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) <= held
    assert step.loss.device == torch.device("cuda:1")
    assert torch.equal(step.loss.cpu(), first.loss.cpu())
    for name, value in expected.items():
        assert torch.equal(ours[name].cpu(), value.cpu()), name


def test_plan_and_evaluate_on_the_second_gpu() -> None:
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
    found = []
    for device in ("cuda:0", "cuda:1"):
        with oomb.Engine(make_model(torch.bfloat16, device=device), config) as engine:
            ids, plan = tokens(device=device), engine.plan(4096)
            step = engine.evaluate(ids, ids)
            found.append((plan.device_bytes, step.loss.cpu()))
    assert found[0] == found[1]


def test_engines_of_two_gpus_take_turns() -> None:
    models = [make_model(torch.bfloat16, device=f"cuda:{gpu}") for gpu in range(2)]
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, **TIERS["two tiers"])
    with oomb.Engine(models[0], config) as one, oomb.Engine(models[1], config) as two:
        losses = []
        for _ in range(2):
            for gpu, engine in enumerate((one, two)):
                ids = tokens(device=f"cuda:{gpu}")
                losses.append(engine.forward_backward(ids, ids).loss.cpu())
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad.cpu(), b.grad.cpu())
