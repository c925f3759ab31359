"""Ranks whose gradient sums are on the host: the bits of sums on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from engine.models import make
from engine.reference import random_ids, take_gradients
from engine.test_host_sums import CopiesInTheEnd

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


def found(rank: int, name: str, place: str) -> dict[str, torch.Tensor] | None:
    """Gradients of two calls, accumulated, and sums."""
    if meshes[2].get_coordinate() is None:
        return None
    dtype, settings = CASES[name]
    model = make("llama", dtype, **SIZES)
    model.model.layers[1].self_attn.o_proj.weight.requires_grad_(False)
    config = oomb.Config(chunk_size=16, page_size=8, main_grad_device=place, **settings)  # type: ignore[arg-type]
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        if place == "host":
            assert engine._grads._host is not None
            engine._grads._host.copies = CopiesInTheEnd()
        losses = [engine.forward_backward(IDS, IDS).loss for _ in range(2)]
        if "backward" not in settings:
            with engine.two_pass(IDS, IDS) as call:
                call.logprobs.square().sum().backward()
                call.sweep()
        made = {"loss": torch.stack(losses)}
        if config.keep_main_grad:
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    made[f"sum of {parameter_name}"] = engine.main_grad(parameter).clone()
    return made | take_gradients(model)


@pytest.mark.parametrize(
    "name", ["plain", "rounded", *(pytest.param(x, marks=SLOW) for x in ("kept sums", "sampled"))]
)
def test_the_bits_are_those_of_sums_on_the_device(name: str, world: World) -> None:
    expected = world.run(found, name, "device")
    ours = world.run(found, name, "host")
    for own, others in zip(ours, expected, strict=True):
        assert (own is None) == (others is None)
        if own is not None:
            assert own.keys() == others.keys()
            assert all(torch.equal(own[key], value) for key, value in others.items())
