"""Pages of latents on ranks that share a sequence: each has all latents and expands its heads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import oomb
from engine.latent_models import IDS, LATENT, adapted, config, keys_and_values, make_latent
from engine.recurrent_models import nothing_rounds_to_float32
from engine.reference import (
    Result,
    assert_equal,
    assert_identical,
    ordinary,
    random_ids,
    take_gradients,
    worst_error,
)
from engine.test_documents import document_ids, one_by_one
from oomb.engine.ranks import shapes_here
from oomb.model.layer_shape import LayerShape
from oomb.plan.machine import Machine
from oomb.plan.planner import Planner

from .world import World, one_group


@dataclass(frozen=True)
class Case:
    """A model and a call of it."""

    model: str = "small"
    heads: int | None = None  # None: those of the model
    adapters: str = ""  # where LoRA stands
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    tokens: int = 75
    lengths: tuple[int, ...] = ()  # of documents
    slots: int | None = None  # of the device tier
    trained: str = ""  # part of the names of what is trained


CASES = {
    **{name: Case(name) for name in LATENT},
    "recompute": Case("minicpm3", config={"recompute": "layer"}),
    "experts, recompute": Case("glm-4.7-flash", config={"recompute": "layer"}),
    "kept outputs": Case(config={"keep_outputs": "all"}),
    "kept outputs, recompute": Case(config={"keep_outputs": "all", "recompute": "layer"}),
    "two tiers": Case("minicpm3", slots=16, config={"keep_outputs": "none"}),
    "two tiers, recompute": Case(slots=6, config={"keep_outputs": "none", "recompute": "layer"}),
    "documents": Case(batch=1, lengths=(13, 30, 32)),
    "short documents": Case(batch=1, lengths=(1, 20, 1, 1, 30)),
    "adapters": Case(adapters="kv_b_proj"),
    "adapters, recompute": Case(adapters="kv_b_proj", config={"recompute": "layer"}),
    "weights on the host": Case(adapters="o_proj", config={"weights": "host"}),
    "expansions alone": Case(trained="kv_b_proj"),
    "upper layer alone": Case(trained="layers.1."),
    **{f"{n} tokens": Case(batch=1, tokens=n) for n in (3, 18, 19, 20, 34, 35, 36, 66)},
}
SIX = {
    "six heads": Case(heads=6),
    "six heads, recompute": Case("minicpm3", heads=6, config={"recompute": "layer"}),
    "six heads, two tiers": Case(heads=6, slots=12, config={"keep_outputs": "none"}),
    "six heads, documents": Case(heads=6, batch=1, lengths=(8, 24, 40, 3)),
    "six heads, adapters": Case("minicpm3", heads=6, adapters="kv_b_proj"),
    **{f"six heads, {n} tokens": Case(heads=6, batch=1, tokens=n) for n in (4, 18, 19, 20)},
}


def model_of(case: Case) -> Any:
    names = ("num_attention_heads", "num_key_value_heads") if case.heads else ()
    model = make_latent(case.model, **dict.fromkeys(names, case.heads))
    if case.adapters:
        model = adapted(model, target=case.adapters)
    if case.trained:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(case.trained in name)
    return model


def width_of(case: Case) -> int:
    return LATENT[case.model][2]


def config_of(case: Case) -> oomb.Config:
    settings = config(**case.config)
    if case.slots is None:
        return settings
    page = -(-width_of(case) // 2) * 2 * settings.page_size * 8
    return replace(settings, device_memory=case.slots * page, host_memory=16 << 20)


def arguments(case: Case) -> dict[str, Any]:
    tokens = sum(case.lengths) or case.tokens
    ids = random_ids(case.batch, tokens)
    documents = {"document_ids": document_ids(case.lengths)} if case.lengths else {}
    return {"input_ids": ids, "labels": ids, **documents}


def over_ranks(rank: int, case: Case, ranks: int) -> Any:
    """Two calls of one engine, and what its pages hold; None on a rank that has no part."""
    mesh = one_group[ranks]
    if mesh.get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model = model_of(case)
        settings = config_of(case)
        with oomb.Engine(model, settings, mesh=mesh) as engine:
            results = []
            for _ in range(2):
                step = engine.forward_backward(**arguments(case))
                results.append(Result(step.loss, take_gradients(model), step))
            widths = [shape.latent for shape in engine._shapes]
    return *results, widths


QUICK = {
    *((name, 2) for name in ("minicpm3", "experts, recompute", "kept outputs", "two tiers")),
    *((name, 2) for name in ("documents", "adapters", "18 tokens", "19 tokens", "20 tokens")),
    *((name, 3) for name in ("six heads", "six heads, recompute", "six heads, 19 tokens")),
}
WHERE = [
    pytest.param(name, ranks, marks=[] if (name, ranks) in QUICK else pytest.mark.slow)
    for name, ranks in (
        ("small", 4),
        *((n, 2) for n in CASES),
        *((n, r) for n in SIX for r in (2, 3)),
    )
]


@pytest.mark.parametrize(("name", "ranks"), WHERE)
@pytest.mark.sampled(12, slow=4)
def test_case(world: World, name: str, ranks: int) -> None:
    case = (CASES | SIX)[name]
    world.start(over_ranks, case, ranks)
    with nothing_rounds_to_float32():
        model, given = model_of(case), arguments(case)
        if case.lengths:
            expected = one_by_one(model, given["input_ids"], case.lengths)
        else:
            expected = ordinary(model, **given)
    results = [found for found in world.answers() if found is not None]
    assert len(results) == ranks
    for found, again, widths in results:
        assert set(widths) == {width_of(case)}
        assert_equal(found, expected)
        assert_identical(found, results[0][0])
        assert_identical(again, found)
        assert case.slots is None or found.step.stats.h2d_bytes > 0


def bytes_of_pages(rank: int, holds_latents: bool) -> tuple[int, int] | None:
    """Of a page, and the most that all took."""
    if one_group[2].get_coordinate() is None:
        return None
    model, ids = make_latent("glm-4.7-flash", torch.float32), random_ids(1, 65)
    settings = config(keep_outputs="none")
    with nullcontext() if holds_latents else keys_and_values():
        engine = oomb.Engine(model, settings, mesh=one_group[2])
    with engine:
        step = engine.forward_backward(ids, ids)
        return engine._calls.layout(settings).slot_bytes, step.stats.device_peak_bytes


def test_each_rank_holds_the_latents_alone(world: World) -> None:
    """192 numbers of a token, the same on each of two ranks; of one head keys and values take
    512."""
    numbers, step = 48 * 2, 2**16  # of filled tokens in two layers; a pool grows in such steps
    machine = Machine.here("cpu").of_rank(2, 2, "replicated")
    model = make_latent("glm-4.7-flash", torch.float32)
    plan = Planner(model, machine).predict(65, config(keep_outputs="none"), timed=False)
    planned = plan.device_pool_bytes
    for holds_latents, width in ((True, 192), (False, 512)):
        found = [x for x in world.run(bytes_of_pages, holds_latents) if x is not None]
        assert len(found) == 2
        pages = 2 * 4 * width * numbers  # with gradients
        for slot_bytes, peak in found:
            assert slot_bytes == 8 * width * 4
            assert pages <= peak <= -(-pages // step) * step
            assert not holds_latents or peak == planned


def test_keys_and_values_of_few_heads_take_less() -> None:
    shape = LayerShape(query_heads=8, kv_heads=8, head_dim=64, window=0, latent=150)
    found = {ranks: shapes_here([shape], ranks, config())[0].latent for ranks in (1, 2, 4, 8)}
    assert found == {1: 150, 2: 150, 4: 150, 8: 0}


def sharded(rank: int, policy: str, recompute: Any) -> tuple[Result, list[int]] | None:
    if one_group[2].get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model = make_latent("minicpm3")
        for layer in model.model.layers:
            fully_shard(layer, mesh=one_group[2])
        fully_shard(model, mesh=one_group[2])
        settings = config(sharded_weights=policy, recompute=recompute)
        with oomb.Engine(model, settings, mesh=one_group[2]) as engine:
            step = engine.forward_backward(IDS, IDS)
            widths = [shape.latent for shape in engine._shapes]
        gradients: Any = take_gradients(model)
        whole = {name: grad.full_tensor() for name, grad in gradients.items()}
    return Result(step.loss, whole, step), widths


@pytest.mark.parametrize(
    ("policy", "recompute"),
    [
        pytest.param("zero1", "none", marks=pytest.mark.slow),
        pytest.param("zero2", "layer", marks=pytest.mark.slow),
        pytest.param("zero3", "none", marks=pytest.mark.slow),
        ("zero3", "layer"),
    ],
)
@pytest.mark.sampled(1)
def test_sharded_weights(world: World, policy: str, recompute: str) -> None:
    world.start(sharded, policy, recompute)
    with nothing_rounds_to_float32():
        expected = ordinary(make_latent("minicpm3"), IDS, IDS)
    for found in filter(None, world.answers()):
        result, widths = found
        assert set(widths) == {LATENT["minicpm3"][2]}
        assert_equal(result, expected)


def sums_in_bfloat16(rank: int, where: dict[str, Any]) -> list[Result] | None:
    if one_group[2].get_coordinate() is None:
        return None
    model = make_latent("minicpm3", torch.bfloat16)
    found = []
    for settings in (config(), config(**where), config(**where)):
        with oomb.Engine(model, settings, mesh=one_group[2]) as engine:
            step = engine.forward_backward(IDS, IDS)
        found.append(Result(step.loss, take_gradients(model), step))
    return found


@pytest.mark.parametrize(
    "where",
    [
        {"main_grad_dtype": "bfloat16"},
        {"kv_grad_dtype": "bfloat16"},
        pytest.param({"main_grad_device": "host"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_that_are_rounded_or_elsewhere(world: World, where: dict[str, Any]) -> None:
    """Near those in fp32, the same bits each time; on the host the bits of those on the device."""
    for found in filter(None, world.run(sums_in_bfloat16, where)):
        plain, ours, again = found
        assert_identical(ours, again)
        if "main_grad_device" in where:
            assert_identical(ours, plain)
        else:
            assert 0 < worst_error(ours, plain)[0] < 0.05
