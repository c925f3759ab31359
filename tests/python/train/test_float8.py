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
from engine.models import make
from engine.reference import random_ids, take_gradients
from oomb.errors import UnsupportedModelError
from oomb.train.errors import BadInput
from oomb.train.float8 import with_float8

logging.getLogger("torchao").setLevel(logging.ERROR)
float8 = pytest.importorskip("torchao.float8")
IDS = random_ids(2, 75)


def _converted(recipe: str) -> Any:
    model = make("llama", torch.float32)
    with_float8(model, recipe, torch.device("cpu"))
    return model


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_chunks_are_one_pass_up_to_rounding(recipe: str, recompute: str) -> None:
    model = _converted(recipe)
    layers = [m for m in model.modules() if isinstance(m, float8.float8_linear.Float8Linear)]
    assert len(layers) == 7 * len(model.model.layers)
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


def test_scales_of_all_tokens_are_refused_by_name() -> None:
    model = make("llama", torch.float32)
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, _: type(module) is nn.Linear
    )
    with pytest.raises(UnsupportedModelError, match="tensorwise float8 makes one scale of all"):
        oomb.Engine(model)


def test_a_run_saves_plain_weights(tmp_path: Path) -> None:
    done = run(prepare(tmp_path, model={"float8": "rowwise", "dtype": "float32"}))
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
