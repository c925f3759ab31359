"""Pages of latents on a GPU: as exact as pages of keys and values, wherever pages lie."""

from __future__ import annotations

import pytest
import torch

import oomb
from engine.latent_models import LATENT, keys_and_values, make_latent
from engine.reference import Result, chunked, random_ids, relative_error

pytestmark = pytest.mark.gpu

CONFIG = {"chunk_size": 512, "page_size": 128}
SHAPES = ("deepseek-v3", "glm-4.7-flash")


def on_gpu(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return make_latent(name, dtype).to("cuda")


def called(model: torch.nn.Module, ids: torch.Tensor | None = None, **settings: object) -> Result:
    ids = (random_ids(2, 1700) if ids is None else ids).to("cuda")
    return chunked(model, oomb.Config(**{**CONFIG, **settings}), ids, ids)  # type: ignore[arg-type]


def worst(found: Result, expected: Result) -> float:
    pairs = ((found.gradients[name], expected.gradients[name]) for name in expected.gradients)
    return max(relative_error(one.double().cpu(), other.double().cpu()) for one, other in pairs)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_fp32_is_that_of_keys_and_values(name: str, recompute: str) -> None:
    model = on_gpu(name, torch.float32)
    with oomb.Engine(model, oomb.Config(**CONFIG)) as engine:
        assert {shape.latent for shape in engine._shapes} == {LATENT[name][2]}
    found = called(model, recompute=recompute)
    with keys_and_values():
        expected = called(model, recompute=recompute)
    assert abs(found.loss / expected.loss - 1) < 1e-5
    assert worst(found, expected) < 2e-4


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_is_as_far_from_fp64_as_with_keys_and_values(name: str) -> None:
    exact = called(on_gpu(name, torch.float64))
    model = on_gpu(name, torch.bfloat16)
    found = called(model)
    with keys_and_values():
        beside = called(model)
    assert worst(found, exact) < 1.5 * worst(beside, exact)


@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
def test_the_same_bits_with_the_host_tier(grad: str) -> None:
    """Some 210 slots of keys, values and gradients in a tier of 104: a wave has 32 pages."""
    model, ids = on_gpu("glm-4.7-flash", torch.bfloat16), random_ids(1, 9000)
    whole = called(model, ids, kv_grad_dtype=grad)
    with oomb.Engine(model, oomb.Config(**CONFIG, kv_grad_dtype=grad)) as engine:  # type: ignore[arg-type]
        slot = engine._calls.layout(engine.config).slot_bytes
    few = called(model, ids, kv_grad_dtype=grad, device_memory=104 * slot, host_memory="1GiB")
    assert few.step.stats.h2d_bytes > 0
    assert few.loss.equal(whole.loss)
    for name, gradient in whole.gradients.items():
        assert few.gradients[name].equal(gradient), name
