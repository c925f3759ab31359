"""Ranks whose gradient sums are on the host, whole or shards: the bits of sums on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from engine.models import make
from engine.reference import random_ids, take_gradients
from engine.test_host_sums import CopiesInTheEnd
from oomb.parallel.whole import own_rows
from oomb.plan import Machine, Planner
from plan.allocations import peak_allocated

from .test_sharded_weights import CASES as SHARDED_CASES
from .test_sharded_weights import model_of, sharded, whole
from .world import World, meshes

IDS = random_ids(2, 91)
SLOW = pytest.mark.slow
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float64, {}),
    "kept sums": (torch.float64, {"keep_main_grad": True, "recompute": "layer"}),
    "sampled": (torch.float32, {"backward": oomb.SampledChunks(keep=0.4, seed=2)}),
    "rounded": (torch.bfloat16, {"main_grad_dtype": "bfloat16"}),
}


def called(engine: oomb.Engine, place: str, *, two_passes: bool = True) -> dict[str, torch.Tensor]:
    """Losses of two calls, accumulated, and of two passes; copies are made as late as can be."""
    if place == "host":
        assert engine._grads._host is not None
        engine._grads._host.copies = CopiesInTheEnd()
    losses = [engine.forward_backward(IDS, IDS).loss for _ in range(2)]
    if two_passes:
        with engine.two_pass(IDS, IDS) as call:
            call.logprobs.square().sum().backward()
            call.sweep()
    return {"loss": torch.stack(losses)}


def found(rank: int, name: str, place: str) -> dict[str, torch.Tensor] | None:
    """Gradients of two calls, accumulated, and sums."""
    if meshes[2].get_coordinate() is None:
        return None
    dtype, settings = CASES[name]
    model = make("llama", dtype, **SIZES)
    model.model.layers[1].self_attn.o_proj.weight.requires_grad_(False)
    config = oomb.Config(chunk_size=16, page_size=8, main_grad_device=place, **settings)  # type: ignore[arg-type]
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        made = called(engine, place, two_passes="backward" not in settings)
        if config.keep_main_grad:
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    made[f"sum of {parameter_name}"] = engine.main_grad(parameter).clone()
    return made | take_gradients(model)


@pytest.mark.parametrize(
    "name", ["plain", "rounded", *(pytest.param(x, marks=SLOW) for x in ("kept sums", "sampled"))]
)
@pytest.mark.sampled(1)
def test_the_bits_are_those_of_sums_on_the_device(name: str, world: World) -> None:
    expected = world.run(found, name, "device")
    ours = world.run(found, name, "host")
    for own, others in zip(ours, expected, strict=True):
        assert (own is None) == (others is None)
        if own is not None:
            assert own.keys() == others.keys()
            assert all(torch.equal(own[key], value) for key, value in others.items())


SHARDS: dict[str, tuple[str, str, torch.dtype, dict[str, Any]]] = {
    "zero2": ("plain", "zero2", torch.float64, {}),
    "zero3, adapters that are whole": ("whole adapters", "zero3", torch.float64, {}),
    "zero3, rounded": ("tied", "zero3", torch.bfloat16, {"main_grad_dtype": "bfloat16"}),
    "zero3, kept sums": ("recompute", "zero3", torch.float64, {"keep_main_grad": True}),
    "zero2, groups in layers": ("groups in layers", "zero2", torch.float32, {}),
}


def found_of_shards(rank: int, name: str, place: str) -> dict[str, torch.Tensor] | None:
    """Gradients of two calls, accumulated, and of two passes, and sums."""
    if meshes[2].get_coordinate() is None:
        return None
    case_name, policy, dtype, own = SHARDS[name]
    case = SHARDED_CASES[case_name]
    model = sharded(model_of(case, 2).to(dtype), 2, case)
    settings: dict[str, Any] = {"chunk_size": 16, "page_size": 8, **case.config, **own}
    config = oomb.Config(sharded_weights=policy, main_grad_device=place, **settings)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        made = called(engine, place)
        if config.keep_main_grad:
            for parameter_name, parameter in model.named_parameters():
                total: Any = engine.main_grad(parameter)
                assert type(total) is type(parameter.data)
                made[f"sum of {parameter_name}"] = total.full_tensor()
        if place == "host":
            host = engine._grads._host
            assert host is not None
            rows = sum(own_rows(p).numel() for p in trained_in_layers(model))
            size = torch.finfo(dtype).bits // 8
            assert rows * size <= host.host_bytes <= rows * size + 256 * 40
            assert host.moved_bytes > 0
    return made | whole(model)


def trained_in_layers(model: Any) -> list[Any]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [p for p in base.model.layers.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.sampled(2)
def test_shards_have_the_bits_of_shards_on_the_device(name: str, world: World) -> None:
    expected = world.run(found_of_shards, name, "device")
    ours = world.run(found_of_shards, name, "host")
    assert sum(own is not None for own in ours) == 4
    for own, others in zip(ours, expected, strict=True):
        assert own.keys() == others.keys()
        for key, value in others.items():
            assert torch.equal(own[key], value), key


def of_eight_layers(place: str) -> tuple[Any, oomb.Config]:
    config = oomb.Config(
        chunk_size=64,
        page_size=64,
        recompute="none",
        keep_outputs="none",
        sharded_weights="zero3",
        main_grad_device=place,  # type: ignore[arg-type]
    )
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    return make("qwen2", torch.float32, **sizes, max_position_embeddings=2048), config


def peaks(rank: int, tokens: int) -> list[int] | None:
    """Of torch's memory in a call, with sums on the device and on the host."""
    if meshes[2].get_coordinate() is None:
        return None
    ids, found = random_ids(1, tokens), []
    for place in ("device", "host"):
        model, config = of_eight_layers(place)
        with oomb.Engine(sharded(model, 2), config, mesh=meshes[2]) as engine:
            calls = [peak_allocated(lambda: engine.forward_backward(ids, ids)) for _ in range(3)]
        found.append(min(calls))  # a message may be freed late, by a thread of its library
    return found


def test_a_call_takes_what_the_plan_spares(world: World) -> None:
    tokens = 129
    world.start(peaks, tokens)
    machine = Machine.here("cpu").of_rank(2, 2, "zero3")
    planned = []
    for place in ("device", "host"):
        model, config = of_eight_layers(place)
        planner = Planner(model, machine)
        planned.append(planner.predict(tokens, config, optimizer=None, timed=False).call_bytes)
    found = [answer for answer in world.answers() if answer is not None]
    on_device, on_host = (min(peaks) for peaks in zip(*found, strict=True))
    assert on_device - on_host == pytest.approx(planned[0] - planned[1], rel=0.02)


def refused(rank: int) -> str:
    if meshes[2].get_coordinate() is None:
        return ""
    model = sharded(model_of(SHARDED_CASES["plain"], 2), 2)
    config = oomb.Config(sharded_weights="zero1", main_grad_device="host")
    try:
        oomb.Engine(model, config, mesh=meshes[2])
    except ValueError as error:
        return str(error)
    return "no error"


def test_whole_sums_of_a_call_stay_on_the_device(world: World) -> None:
    for text in filter(None, world.run(refused)):
        assert "main_grad_device: expected 'device' beside sharded_weights='zero1'" in text
