"""torchao's float8 layers: chunks give what one pass gives; ``oomb train`` takes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import prepare, run
from torch import nn
from transformers import AutoModelForCausalLM

import oomb
from engine.float8_case import expect_as_near_as_torchao
from engine.models import make
from engine.reference import random_ids, take_gradients
from oomb.errors import UnsupportedModelError
from oomb.model.float8 import RECIPE, _Inputs, float8_forwards, rows_in_float8, scaled_product
from oomb.train.errors import BadInput
from oomb.train.float8 import with_float8

logging.getLogger("torchao").setLevel(logging.ERROR)
float8 = pytest.importorskip("torchao.float8")
IDS = random_ids(2, 75)


def _converted(recipe: str) -> Any:
    model = make("llama", torch.float32)
    with_float8(model, recipe, torch.device("cpu"))
    return model


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, float8.float8_linear.Float8Linear)]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_chunks_are_one_pass_up_to_rounding(recipe: str, recompute: str) -> None:
    model = _converted(recipe)
    assert len(_layers(model)) == 7 * len(model.model.layers)
    expected_loss = model(input_ids=IDS, labels=IDS).loss
    expected_loss.backward()
    expected = take_gradients(model)
    plain = make("llama", torch.float32)
    plain(input_ids=IDS, labels=IDS).loss.backward()
    unrounded = take_gradients(plain)
    model.zero_grad()
    config = oomb.Config(chunk_size=16, page_size=8, recompute=recompute, keep_main_grad=True)  # type: ignore[arg-type]
    with oomb.Engine(model, config) as engine:
        step = engine.forward_backward(IDS, IDS)
        for name, parameter in model.named_parameters():
            assert torch.equal(engine.main_grad(parameter), parameter.grad), name
    assert float(step.loss) == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    for name, gradient in take_gradients(model).items():
        assert _distance(gradient, expected[name]) < 1e-4, name
    # That is no accident of products that are not in float8 at all.
    weight = "model.layers.0.mlp.up_proj.weight"
    assert _distance(expected[weight], unrounded[weight]) > 1e-3


@pytest.mark.parametrize("frozen", [False, True])
def test_an_input_is_cast_once_for_the_layers_that_read_it(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v; o; gate and up; down: four casts for seven layers."""
    model = _converted(RECIPE)
    for layer in _layers(model):
        layer.requires_grad_(not frozen)
    made: list[int] = []

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(x.shape[0])
        return rows_in_float8(x)

    monkeypatch.setattr("oomb.model.float8.rows_in_float8", counted)
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        tokens, layers = 2 * 16, len(model.model.layers)  # the last token is no input
        assert all(layer.weight.shape[0] != tokens for layer in _layers(model))
        made.clear()  # those of checks
        engine.evaluate(IDS[:, :17], IDS[:, :17])
        assert made.count(tokens) == 4 * layers
        made.clear()
        engine.forward_backward(IDS[:, :17], IDS[:, :17])
    assert made.count(tokens) == (4 + 7) * layers  # and a gradient for each layer


def test_an_input_that_has_changed_is_cast_anew() -> None:
    inputs = _Inputs()
    x = torch.randn(2, 3, 32)
    before = [part.clone() for part in inputs.cast(x)]
    assert inputs.cast(x)[0] is inputs.cast(x)[0]
    x.mul_(-2)
    codes, scales = inputs.cast(x)
    assert not torch.equal(codes.float(), before[0].float())
    assert torch.equal(scales, 2 * before[1])
    assert inputs.cast(x[:1])[0].shape == (3, 32)


def test_where_torch_counts_no_changes_and_under_autocast() -> None:
    model = _converted(RECIPE)
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        expected = engine.evaluate(IDS, IDS).loss
        with torch.inference_mode():
            assert torch.equal(engine.evaluate(IDS, IDS).loss, expected)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = engine.evaluate(IDS, IDS).loss
    assert not torch.equal(rounded, expected)
    assert float(rounded) == pytest.approx(float(expected), rel=0.02)


def test_layers_of_other_recipes_and_compiled_ones_are_left_alone() -> None:
    assert not float8_forwards(_converted("rowwise"), None)
    model = _converted(RECIPE)
    _layers(model)[3].compile()
    assert len(float8_forwards(model, None)) == len(_layers(model)) - 1


def test_values_that_are_not_finite_stay_visible() -> None:
    """A scale of NaN makes a token's outputs NaN; the others keep theirs."""
    x, w = torch.ones(3, 32), torch.ones(16, 32)
    x[1, 4] = torch.inf
    y = scaled_product(*rows_in_float8(x), *rows_in_float8(w), None, torch.float32, True)
    assert y[1].isnan().all() and bool((y[[0, 2]] == 32).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_near_as_torchaos_own_layers(dtype: torch.dtype) -> None:
    """Also in bf16, where torchao's emulated products round otherwise than ours."""
    expect_as_near_as_torchao("cpu", dtype, emulate=True)


def test_a_weight_whose_gradient_somebody_changes() -> None:
    """Autograd brings it then, and no sum does."""
    found = []
    for watched in (False, True):
        model = _converted(RECIPE)
        weight = model.model.layers[1].mlp.up_proj.weight
        if watched:
            weight.register_hook(lambda gradient: 2 * gradient)
        with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
            engine.forward_backward(IDS, IDS)
        found.append(take_gradients(model))
    plain, changed = found
    name = "model.layers.1.mlp.up_proj.weight"
    assert _distance(changed.pop(name), 2 * plain.pop(name)) < 1e-6
    assert all(torch.equal(changed[other], gradient) for other, gradient in plain.items())


def test_scales_of_all_tokens_are_refused_by_name() -> None:
    model = make("llama", torch.float32)
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, _: type(module) is nn.Linear
    )
    with pytest.raises(UnsupportedModelError, match="tensorwise float8 makes one scale of all"):
        oomb.Engine(model)


@pytest.mark.parametrize("recipe", ["rowwise", RECIPE])
def test_a_run_saves_plain_weights(recipe: str, tmp_path: Path) -> None:
    done = run(prepare(tmp_path, model={"float8": recipe, "dtype": "float32"}))
    assert done.exit_code == 0, done.output
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert all(type(m) is not float8.float8_linear.Float8Linear for m in trained.modules())
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_beside_adapters_it_is_refused(tmp_path: Path) -> None:
    done = run(prepare(tmp_path, lora={"r": 4}, model={"float8": "rowwise"}))
    assert done.exit_code == 2
    assert "model.float8: expected null beside the section lora" in done.output


@pytest.mark.parametrize(
    ("capability", "dtype", "words"),
    [
        ((8, 0), torch.bfloat16, "expected a GPU with products in float8"),
        ((9, 0), torch.float32, "expected weights in bfloat16 on a GPU, got float32"),
    ],
)
def test_gpus_and_dtypes_without_it(
    capability: tuple[int, int], dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights are on the CPU until the engine or shards bring them to the GPU."""
    model = make("llama", dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    with pytest.raises(BadInput, match=words):
        with_float8(model, "rowwise", torch.device("cuda"))


def test_products_for_a_gpu_are_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are on the CPU there, for ``engine.weights: host`` and for shards."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = make("llama", torch.bfloat16)
    with_float8(model, "rowwise", torch.device("cuda"))
    config = model.model.layers[0].mlp.up_proj.config
    assert config.pad_inner_dim and not config.emulate
