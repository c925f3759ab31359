"""Heads that ranks exchange in groups: bits, memory of exchanges, plans, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import oomb
from engine.latent_models import make_latent
from engine.models import make
from engine.reference import Result, assert_identical, random_ids, take_gradients
from oomb.core.head_groups import GroupOutputs, calls_of_groups
from oomb.core.layer_attention import LayerAttention
from oomb.engine.ranks import shapes_here
from oomb.model.interface import AttentionCall
from oomb.model.layer_shape import LayerShape
from oomb.plan import Machine, Planner
from plan.allocations import peak_allocated

from .world import World, meshes

PLAIN: dict[str, Any] = {"chunk_size": 16, "page_size": 8, "recompute": "none"}
SLOT = 2 * 8 * 8 * 8  # bytes of a page for one KV head

# Which heads ------------------------------------------------------------------------------------


def call_of(keys: int) -> AttentionCall:
    q, k, v = (
        torch.randn(2, heads, 5, 4, dtype=torch.float64, requires_grad=True)
        for heads in (3 * keys, keys, keys)
    )
    sinks = torch.arange(3.0 * keys)
    return AttentionCall(nn.Identity(), q, k, v, 1.0, 0, 0.0, sinks, mask=None)


@pytest.mark.parametrize(("keys", "groups"), [(2, 2), (12, 2), (12, 3), (4, 1)])
def test_heads_come_back_in_order(keys: int, groups: int) -> None:
    call, each = call_of(keys), keys // groups
    parts = calls_of_groups(call, groups)
    assert len(parts) == groups
    for group, part in enumerate(parts):
        own = range(group * each, (group + 1) * each)
        queries = [3 * key + i for key in own for i in range(3)]
        assert torch.equal(part.k, call.k[:, own])
        assert torch.equal(part.v, call.v[:, own])
        assert torch.equal(part.q, call.q[:, queries])
        assert part.sinks is not None
        assert part.sinks.tolist() == queries
    outputs = GroupOutputs(3 * keys)
    for group, part in enumerate(parts):
        outputs.put(group, part.q)
    whole = outputs.whole
    assert torch.equal(whole, call.q)
    assert whole.transpose(1, 2).is_contiguous()
    weights = torch.randn_like(whole)
    (grad,) = torch.autograd.grad((whole * weights).sum(), call.q)
    assert torch.equal(grad, weights)


# Bits -------------------------------------------------------------------------------------------

SAME = {
    "dense": {},
    "recompute": {"recompute": "layer"},
    "kept outputs": {"keep_outputs": "all"},
    "two tiers": {"keep_outputs": "none", "device_memory": 60 * SLOT, "host_memory": "4MiB"},
}


def tiny(**settings: Any) -> Any:
    sizes = {"num_key_value_heads": 8, "num_attention_heads": 16, "num_hidden_layers": 2}
    return make("qwen2", **{**sizes, **settings})


def of_call(rank: int, settings: dict[str, Any], groups: int) -> Result | None:
    if meshes[2].get_coordinate() is None:
        return None
    model, ids = tiny(), random_ids(2, 140)
    config = oomb.Config(**{**PLAIN, **settings}, head_groups=groups)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        step = engine.forward_backward(ids, ids)
    return Result(step.loss, take_gradients(model), step)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.sampled(2)
def test_same_bits(world: World, name: str) -> None:
    whole, *_ = world.run(of_call, SAME[name], 1)
    for groups in (2, 4):
        for found in world.run(of_call, SAME[name], groups):
            assert_identical(found, whole)
            stats = found.step.stats
            assert bool(stats.h2d_bytes) == (name == "two tiers")
            assert stats.kept_output_share == whole.step.stats.kept_output_share
            for passed, seconds in stats.exposed_by_layer.items():
                assert len(seconds) == 2
                assert sum(seconds) == pytest.approx(sum(stats.exposed_by_chunk[passed]))
            waited = sum(map(sum, stats.exposed_by_layer.values()))
            assert (waited > 0) == (name == "two tiers")


# Memory -----------------------------------------------------------------------------------------


def memory_of_exchanges(rank: int, groups: int, recompute: str) -> tuple[int, int] | None:
    """Bytes of a call's largest exchange around attention, sent and received; and the most that
    attention holds in the fill at once. Of groups the layer's output, which they are put into, is
    no part of it; what comes back of each is."""
    if meshes[2].get_coordinate() is None:
        return None
    model, ids = tiny(num_hidden_layers=1, head_dim=64), random_ids(1, 2049)
    settings = {**PLAIN, "chunk_size": 1024, "page_size": 64, "recompute": recompute}
    config = oomb.Config(**settings, keep_outputs="none", head_groups=groups)
    largest, peaks, attend = 0, list[int](), LayerAttention.attend

    def measured(attention: LayerAttention, call: AttentionCall) -> torch.Tensor:
        if torch.is_grad_enabled() or call.q.shape[2] < 512:
            return attend(attention, call)  # type: ignore[no-any-return]
        found: list[torch.Tensor] = []
        held = peak_allocated(lambda: found.append(attend(attention, call)))
        peaks.append(held - (found[0].nbytes if groups > 1 else 0))
        return found[0]

    with (
        pytest.MonkeyPatch.context() as patch,
        oomb.Engine(model, config, mesh=meshes[2]) as engine,
    ):
        group: Any = engine._placement.group  # type: ignore[attr-defined]
        exchange = group.all_to_all

        def counted(send: torch.Tensor, sizes: Any, received: Any, most: int) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, (send.numel() + sum(received)) * send.element_size())
            return exchange(send, sizes, received, most)

        patch.setattr(group, "all_to_all", counted)
        patch.setattr(LayerAttention, "attend", measured)
        for _ in range(
            4
        ):  # a late rank makes another hold what it sent for longer: the least counts
            engine.evaluate(ids, ids)  # attends in the last layer too
        engine.forward_backward(ids, ids)
    return largest, min(peaks)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.sampled(1)
def test_exchanges_take_an_nth(world: World, recompute: str) -> None:
    whole, *_ = world.run(memory_of_exchanges, 1, recompute)
    for groups in (2, 4):
        for largest, peak in filter(None, world.run(memory_of_exchanges, groups, recompute)):
            assert largest * groups == whole[0]
            assert peak == pytest.approx(whole[1] / groups, rel=0.01)


def planned_memory(rank: int, groups: int) -> tuple[int, int] | None:
    """Peak of a step beside its pages, and the engine's plan of it."""
    if meshes[2].get_coordinate() is None:
        return None
    model, ids = tiny(num_hidden_layers=1), random_ids(1, 2049)
    config = oomb.Config(**{**PLAIN, "chunk_size": 1024, "page_size": 64}, head_groups=groups)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        plan, steps = engine.plan(2049), list[oomb.Step]()
        peaks = [
            peak_allocated(lambda: steps.append(engine.forward_backward(ids, ids)))
            for _ in range(3)
        ]
    return min(peaks), plan.device_bytes - steps[0].stats.device_peak_bytes


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.sampled(1)
def test_plan(world: World, groups: int) -> None:
    """Of the engine and of `oomb plan`."""
    world.start(planned_memory, groups)
    config = oomb.Config(**{**PLAIN, "chunk_size": 1024, "page_size": 64}, head_groups=groups)
    machine = Machine.here("cpu").of_rank(2, 2, "replicated")
    planner = Planner(tiny(num_hidden_layers=1), machine)
    planned = planner.predict(2049, config, optimizer=None, timed=False)
    whole = planner.predict(2049, replace(config, head_groups=1), optimizer=None, timed=False)
    assert planned.device_pool_bytes == whole.device_pool_bytes
    found = list(filter(None, world.answers()))
    peak = min(peak for peak, _ in found)
    assert planned.call_bytes - 2048 * 3 * 8 == pytest.approx(peak, rel=0.03)
    for _, beside in found:
        assert beside == pytest.approx(peak, rel=0.06)


# What is told of layers, and refused --------------------------------------------------------------


def not_finite(rank: int) -> str | None:
    if meshes[2].get_coordinate() is None:
        return None
    model, ids = tiny(), random_ids(1, 40)
    config = oomb.Config(**PLAIN, head_groups=4, check_finite=True)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        model.model.layers[1].self_attn.o_proj.weight.data.fill_(1e308)
        model.model.norm.register_forward_hook(lambda _, __, x: x.nan_to_num(0.0, 0.0, 0.0))
        with pytest.raises(oomb.Error) as error:
            engine.forward_backward(ids, ids)
    return str(error.value)


def test_layers_have_the_models_numbers(world: World) -> None:
    found = list(filter(None, world.run(not_finite)))
    assert len(found) == 4
    assert all("layer 1: the gradient of attention is not finite" in text for text in found)


def windows(rank: int, groups: int) -> list[int] | None:
    if meshes[2].get_coordinate() is None:
        return None
    model = make("gemma2", num_attention_heads=8, num_key_value_heads=4)
    config = oomb.Config(**PLAIN, head_groups=groups)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        return engine.layer_windows


def test_layers_have_the_models_windows(world: World) -> None:
    alternating, *_ = world.run(windows, 1)
    assert len(set(alternating)) == 2
    assert world.run(windows, 2) == [alternating] * 4


def refused(rank: int, make_model: Callable[[], Any], groups: int) -> str | None:
    if meshes[2].get_coordinate() is None:
        return None
    with pytest.raises(oomb.UnsupportedModelError) as error:
        oomb.Engine(make_model(), oomb.Config(**PLAIN, head_groups=groups), mesh=meshes[2])
    return str(error.value)


def one_key() -> Any:
    return tiny(num_key_value_heads=1)


def latents() -> Any:
    return make_latent("minicpm3", num_attention_heads=16, num_key_value_heads=16)


@pytest.mark.parametrize(
    ("make_model", "groups", "expected"),
    [
        (tiny, 3, "a divisor of the 4 key/value heads that a rank holds, got 3"),
        (tiny, 8, "a divisor of the 4 key/value heads that a rank holds, got 8"),
        (one_key, 2, "expected 1 where ranks hold copies of key/value heads"),
        (latents, 2, "expected 1 for a model whose pages hold latents"),
    ],
)
def test_refused(world: World, make_model: Any, groups: int, expected: str) -> None:
    found = list(filter(None, world.run(refused, make_model, groups)))
    assert len(found) == 4
    assert all("] head_groups: " in text and expected in text for text in found)


@pytest.mark.parametrize("groups", [0, -1, True, 1.5, "2"])
def test_groups_are_a_number(groups: Any) -> None:
    with pytest.raises(ValueError, match="head_groups: expected an int >= 1, got"):
        oomb.Config(head_groups=groups)


def test_page_rules_see_all_heads() -> None:
    with pytest.raises(ValueError, match="head_groups: expected 1, as page rules"):
        oomb.Config(head_groups=2, attention=oomb.TopKPages(budget=4))


def test_one_process_has_one_group() -> None:
    shapes = [LayerShape(8, 1, 8, 0)]
    assert shapes_here(shapes, 1, oomb.Config(head_groups=4)) == shapes


def test_groups_of_layers_that_share() -> None:
    """Each group reads the pages of the same group."""
    shapes = [LayerShape(8, 4, 8, 0), LayerShape(8, 4, 8, 16), LayerShape(8, 4, 8, 0, source=0)]
    here = shapes_here(shapes, 2, oomb.Config(head_groups=2))
    assert [shape.source for shape in here] == [None] * 4 + [0, 1]
    assert [shape.window for shape in here] == [0, 0, 16, 16, 0, 0]
    assert {(shape.query_heads, shape.kv_heads) for shape in here} == {(2, 1)}
