"""What has to be as before when a call did not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import oomb
from oomb.core.attention import ChunkAttention

from .reference import Result, assert_identical, random_ids, take_gradients
from .tiers import HOST, slot_bytes

IDS = random_ids(1, 120)  # 8 chunks
SPARSE = oomb.TopKPages(budget=3)


def config(model: PreTrainedModel, **settings: Any) -> oomb.Config:
    """A tier of 12 pages, so that copies are under way when something fails."""
    page = slot_bytes(model, oomb.Config(chunk_size=16, page_size=8))
    return oomb.Config(
        chunk_size=16, page_size=8, device_memory=12 * page, host_memory=HOST, **settings
    )


def stop_at(phase: str, chunk: int, error: BaseException) -> Callable[[oomb.Progress], None]:
    def report(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == (phase, chunk):
            raise error

    return report


def usual(engine: oomb.Engine, model: PreTrainedModel) -> Result:
    step = engine.forward_backward(IDS, IDS)
    return Result(step.loss, take_gradients(model))


def assert_untouched(
    engine: oomb.Engine, model: PreTrainedModel, before: dict[str, torch.Tensor], expected: Result
) -> None:
    """Gradients are the same objects with the same bits, pools are empty, the model is in order."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert bool((before[name] == 7).all())
        assert not parameter._post_accumulate_grad_hooks
    assert engine._pools.manager is not None
    engine._pools.manager.check_integrity()
    assert not ChunkAttention.active
    assert model.config._attn_implementation == "sdpa"
    take_gradients(model)
    assert_identical(usual(engine, model), expected)


def with_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
