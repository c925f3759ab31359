"""Precision below fp64: far positions, bf16, autocast, gradient pages in bf16."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb

from .models import make
from .reference import (
    Result,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
    worst_error,
)

CHUNK, PAGE = 16, 8


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(chunk_size=CHUNK, page_size=PAGE, **settings)


# Far positions ------------------------------------------------------------------------------------


def at_position(start: int, rope_angles: str, name: str) -> Result:
    model = make(name, torch.float32, max_position_embeddings=5_000_000)
    ids = random_ids(1, 40)
    positions = torch.arange(40)[None] + start
    return chunked(model, config(rope_angles=rope_angles), ids, ids, position_ids=positions)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt-oss"])
def test_float64_angles_do_not_depend_on_the_position(name: str) -> None:
    """Only differences of positions enter attention, so an offset must not change the result."""
    near, far = at_position(0, "float64", name), at_position(4_000_003, "float64", name)
    error, where = worst_error(far, near)
    assert error <= 2e-5, where


@pytest.mark.filterwarnings("ignore:position")
def test_the_angles_of_models_do() -> None:
    """What the option is for: the fp32 product of position and frequency is off by 0.1 rad."""
    near, far = at_position(0, "model", "llama"), at_position(4_000_003, "model", "llama")
    assert worst_error(far, near)[0] > 1e-3


def test_float64_angles_near_zero_are_the_models() -> None:
    near, exact = at_position(0, "model", "llama"), at_position(0, "float64", "llama")
    assert worst_error(exact, near)[0] < 2e-5


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic"])
def test_float64_angles_keep_the_scaling_of_the_model(rope_type: str) -> None:
    """Frequencies and attention factor of the variant stay; positions are beyond its original."""
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 40,
    }
    model = make(
        "llama",
        torch.float32,
        rope_parameters=rope,
        max_position_embeddings=160 if rope_type == "yarn" else 40,
    )
    ids = random_ids(1, 75)
    expected = ordinary(model, ids, ids)
    result = chunked(model, config(rope_angles="float64"), ids, ids)
    assert worst_error(result, expected)[0] < 2e-5


def test_far_positions_warn_once() -> None:
    model = make("llama", torch.float32, max_position_embeddings=5_000_000)
    ids = random_ids(1, 40)
    far = torch.arange(40)[None] + 4_000_000
    with oomb.Engine(model, config()) as engine:
        with pytest.warns(UserWarning, match=r"position 4000039: .* 0\.12 rad") as caught:
            engine.evaluate(ids, ids, position_ids=far)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.evaluate(ids, ids, position_ids=far)
    with oomb.Engine(model, config(rope_angles="float64")) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.evaluate(ids, ids, position_ids=far)


def test_positions_that_the_model_was_not_made_for_warn_once() -> None:
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    scaled["original_max_position_embeddings"] = 30
    ids = random_ids(1, 40)
    with oomb.Engine(make("llama", max_position_embeddings=39), config()) as engine:
        with pytest.warns(UserWarning, match="position 39: the model's config declares 39") as seen:
            engine.evaluate(ids, ids)
        assert [warning.filename for warning in seen] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.evaluate(ids, ids)
    for fits in (
        {"max_position_embeddings": 40},
        {"max_position_embeddings": 30, "rope_parameters": scaled},
    ):
        model = make("llama", **fits)
        with oomb.Engine(model, config()) as engine, warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.evaluate(ids, ids)


# bf16 and autocast --------------------------------------------------------------------------------


def total_error(value: Result, expected: Result) -> float:
    """Of all gradients together."""
    pairs = [
        (value.gradients[name].flatten(), g.flatten()) for name, g in expected.gradients.items()
    ]
    ours, reference = (torch.cat(list(parts)).double() for parts in zip(*pairs, strict=True))
    return relative_error(ours, reference)


def assert_as_good_as_ordinary(result: Result, usual: Result, reference: Result) -> None:
    """At most twice the error of ordinary training in the same precision: in total, and for every
    parameter, where a small one may have the error of the whole."""
    worst = total_error(usual, reference)
    assert total_error(result, reference) <= 2 * worst
    loss_error = relative_error(usual.loss, reference.loss)
    assert relative_error(result.loss, reference.loss) <= 2 * max(loss_error, 2**-9)
    for name, gradient in reference.gradients.items():
        own = relative_error(usual.gradients[name], gradient)
        assert relative_error(result.gradients[name], gradient) <= 2 * max(own, worst), name


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights, as the reference's, are exactly representable."""
    copy = type(model)(model.config)
    copy.set_attn_implementation(model.config._attn_implementation)
    copy.load_state_dict(model.state_dict())
    return copy.to(torch.bfloat16).eval()  # type: ignore[no-any-return]


def rounded(name: str) -> PreTrainedModel:
    """An fp32 model with weights that bf16 holds."""
    model = make(name, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("kv_grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [75, 200])
@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "mistral"])
def test_bfloat16(name: str, tokens: int, kv_grad_dtype: str) -> None:
    model = rounded(name)
    ids = random_ids(2, tokens)
    reference = ordinary(model, ids, ids)
    low = in_bfloat16(model)
    usual = ordinary(low, ids, ids)
    result = chunked(low, config(kv_grad_dtype=kv_grad_dtype), ids, ids)
    assert all(gradient.dtype == torch.bfloat16 for gradient in result.gradients.values())
    assert_as_good_as_ordinary(result, usual, reference)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("tokens", [75, 200])
@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "mistral"])
@pytest.mark.sampled(6)
def test_autocast_over_fp32_weights(name: str, tokens: int, recompute: str) -> None:
    model = make(name, torch.float32)
    ids = random_ids(2, tokens)
    reference = ordinary(model, ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        usual = ordinary(model, ids, ids)
        result = chunked(model, config(recompute=recompute), ids, ids)
    assert all(gradient.dtype == torch.float32 for gradient in result.gradients.values())
    assert_as_good_as_ordinary(result, usual, reference)


def test_attention_under_autocast_is_that_of_16_bits() -> None:
    """Rotation leaves queries and keys in fp32, for which pages are larger and kernels slow."""
    ids = random_ids(1, 200)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = chunked(make("llama", torch.float32), config(), ids, ids)
    pure = chunked(in_bfloat16(rounded("llama")), config(), ids, ids)
    assert mixed.step is not None and pure.step is not None
    assert mixed.step.stats.device_peak_bytes == pure.step.stats.device_peak_bytes > 0


def test_float32() -> None:
    model = make("llama", torch.float32)
    ids = random_ids(2, 200)
    reference = ordinary(make("llama"), ids, ids)
    usual, result = ordinary(model, ids, ids), chunked(model, config(), ids, ids)
    assert total_error(result, reference) <= 2 * total_error(usual, reference)


def test_sums_over_many_chunks_keep_their_precision() -> None:
    """100 chunks are as good as one: added up in bf16, the sum would lose what each brings."""
    model = rounded("llama")
    ids = random_ids(1, 800)
    reference = ordinary(model, ids, ids)
    low = in_bfloat16(model)
    one, many = (
        chunked(low, oomb.Config(chunk_size=chunk, page_size=8), ids, ids) for chunk in (800, 8)
    )
    for name, gradient in reference.gradients.items():
        if "lm_head" in name or "norm" in name:  # their terms differ by nothing but the sum
            error = relative_error(many.gradients[name], gradient)
            assert error <= 1.2 * relative_error(one.gradients[name], gradient), name
    assert total_error(many, reference) <= 1.2 * total_error(one, reference)


def test_rounding_is_reproducible() -> None:
    low = in_bfloat16(rounded("llama"))
    ids = random_ids(1, 75)
    results = [chunked(low, config(kv_grad_dtype="bfloat16"), ids, ids) for _ in range(2)]
    assert_identical(results[0], results[1])


def test_rounding_resumes() -> None:
    """The seed of a call's rounding is part of state_dict()."""
    low = in_bfloat16(rounded("llama"))
    ids = random_ids(1, 75)
    settings = config(kv_grad_dtype="bfloat16")
    with oomb.Engine(low, settings) as engine:
        engine.forward_backward(ids, ids)
        first = take_gradients(low)
        state = engine.state_dict()
        step = engine.forward_backward(ids, ids)
        second = Result(step.loss, take_gradients(low))
    assert any(not torch.equal(first[name], g) for name, g in second.gradients.items())
    with oomb.Engine(low, settings) as engine:
        engine.load_state_dict(state)
        step = engine.forward_backward(ids, ids)
        assert_identical(Result(step.loss, take_gradients(low)), second)
