"""What plans say of torch's memory on ranks that share a sequence, and what these allocate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import oomb
from engine.latent_models import make_latent
from engine.models import make
from oomb.plan import Machine, Planner
from plan.allocations import peak_allocated

from .world import World, one_group

SCRATCH = 512  # tokens of a past of latents that are expanded at once, for 8192
CALLS = 3


@dataclass(frozen=True)
class Case:
    """A call of a model on two ranks."""

    model: str = "minicpm3"
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    tokens: int = 1025
    heads: tuple[int, int] = (6, 2)  # of queries and keys, of qwen2


CASES = {
    "keys and values": Case("qwen2"),
    "keys and values, recompute": Case(  # chunks outweigh the exchange of sums at the end
        "qwen2", {"recompute": "layer", "chunk_size": 1024}, tokens=2049
    ),
    "copies": Case("qwen2", heads=(8, 1)),
    "divided pages": Case("qwen2", {"divide_pages": True}, heads=(8, 1), batch=2),
    "divided pages, recompute": Case(
        "qwen2",
        {"divide_pages": True, "recompute": "layer", "chunk_size": 1024},
        heads=(8, 1),
        tokens=2049,
    ),
    "copies under a page rule": Case(
        "qwen2", {"attention": oomb.TopKPages(budget=4)}, heads=(8, 1), batch=2
    ),
    "divided pages under a page rule": Case(
        "qwen2",
        {"divide_pages": True, "attention": oomb.TopKPages(budget=4)},
        heads=(8, 1),
        batch=2,
    ),
    "latents": Case(),
    "latents, recompute": Case(config={"recompute": "layer"}, batch=2),
    "latents under a page rule": Case(config={"attention": oomb.TopKPages(budget=128)}),
}


def model_of(case: Case) -> Any:
    if case.model == "qwen2":
        queries, keys = case.heads
        sizes = {"num_attention_heads": queries, "num_key_value_heads": keys}
        return make("qwen2", torch.float32, max_position_embeddings=4096, **sizes)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return make_latent(case.model, torch.float32, max_position_embeddings=4096, **heads)


def config_of(case: Case) -> oomb.Config:
    own = {"chunk_size": 256, "page_size": 64, "recompute": "none", "keep_outputs": "none"}
    return oomb.Config(**{**own, **case.config})


def measured(rank: int, case: Case) -> tuple[int, int, int] | None:
    """The least of several calls' peaks, the engine's plan, and what pages take of it.

    A message may be freed late, by a thread of the library that sends it.
    """
    if one_group[2].get_coordinate() is None:
        return None
    generator = torch.Generator().manual_seed(1)  # ranks have drawn other numbers before
    ids = torch.randint(97, (case.batch, case.tokens), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oomb.core.latent_groups.SCRATCH_TOKENS", SCRATCH)
        with oomb.Engine(model_of(case), config_of(case), mesh=one_group[2]) as engine:
            planned, steps, peaks = engine.plan(case.tokens, case.batch), list[oomb.Step](), []
            for _ in range(CALLS):
                peaks.append(
                    peak_allocated(lambda: steps.append(engine.forward_backward(ids, ids)))
                )
    return min(peaks), planned.device_bytes, steps[0].stats.device_peak_bytes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(6)
def test_memory_of_a_rank(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr("oomb.core.latent_groups.SCRATCH_TOKENS", SCRATCH)
    world.start(measured, case)
    machine = Machine.here("cpu").of_rank(2, 2, "replicated")
    predicted = Planner(model_of(case), machine).predict(
        case.tokens, config_of(case), batch_size=case.batch, optimizer=None, timed=False
    )
    made = predicted.call_bytes - case.batch * (case.tokens - 1) * 3 * 8  # what the caller has
    made += predicted.list_bytes  # on a CPU in the same memory
    found = [x for x in world.answers() if x is not None]
    assert len(found) == 2
    peak = min(peak for peak, _, _ in found)
    assert made == pytest.approx(peak, rel=0.03)
    most = max(pools for _, _, pools in found)  # of divided pages ranks have unequal shares
    for _, planned, _ in found:
        assert planned == pytest.approx(peak + most, rel=0.06)
