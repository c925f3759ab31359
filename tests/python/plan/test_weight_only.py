"""Bases in 8 bits of torchao under adapters: gradients, memory, refusals, and plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import oomb
from oomb.plan import Machine, Planner
from oomb.trace.bare import bare_model

from .allocations import peak_allocated

logging.getLogger("torchao").setLevel(logging.ERROR)
ao = pytest.importorskip("torchao.quantization")

IDS = torch.randint(1, 256, (2, 150), generator=torch.Generator().manual_seed(3))
SHAPE = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LORA = {"r": 4, "target_modules": "all-linear"}
FORMATS: dict[str, Callable[[], Any]] = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "int8, groups": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)),
    "float8": lambda: ao.Float8WeightOnlyConfig(),
    "4 bits in a byte": lambda: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(32)
    ),
}


def adapted(
    kind: str,
    dtype: torch.dtype = torch.float32,
    shape: Any = SHAPE,
    head: bool = False,
    **lora: Any,
) -> Any:
    """With adapters of which no factor is zero, so that every one gets a gradient."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(shape).to(dtype)
    ao.quantize_(base if head else base.model, FORMATS[kind]())
    model: Any = get_peft_model(base, LoraConfig(**LORA | lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("kind", "settings", "others"),
    [
        ("int8", {"recompute": "none"}, {}),
        ("int8", {"recompute": "layer"}, {"use_dora": True, "head": True}),
        ("int8, groups", {}, {}),
        ("float8", {}, {"shape": LlamaConfig(**SHAPE.to_dict() | {"attention_bias": True})}),
        ("4 bits in a byte", {}, {}),
    ],
)
def test_gradients_are_those_of_ordinary_training(
    kind: str, settings: Any, others: dict[str, Any]
) -> None:
    """Also of adapters below layers that are quantised: torchao's own backward is the reference."""
    model = adapted(kind, **others)
    with oomb.Engine(model, oomb.Config(chunk_size=32, page_size=16, **settings)) as engine:
        step = engine.forward_backward(IDS, IDS)
    ours = gradients(model)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    theirs = gradients(model)
    assert float(step.loss) == pytest.approx(loss.item(), rel=1e-5)
    assert ours.keys() == theirs.keys()
    assert all(n in ours for n, p in model.named_parameters() if p.requires_grad)
    for name, gradient in theirs.items():
        assert gradient.norm() > 0
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_nothing_is_left_on_the_model() -> None:
    model = adapted("int8")
    with oomb.Engine(model, oomb.Config(chunk_size=32, page_size=16)) as engine:
        engine.forward_backward(IDS, IDS)
    assert not any("forward" in vars(m) for m in model.modules() if type(m) is nn.Linear)


@pytest.mark.parametrize("kind", ["int8", "4 bits in a byte"])
def test_weights_on_the_host(kind: str) -> None:
    """Codes travel, scales stay; no bit changes."""
    results = []
    for weights in ("device", "host"):
        model = adapted(kind, use_dora=True)
        settings = oomb.Config(chunk_size=32, page_size=16, weights=weights)  # type: ignore[arg-type]
        with oomb.Engine(model, settings) as engine:
            step = engine.forward_backward(IDS, IDS)
            moved = engine._model.host_weights
            if moved is not None:
                values = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 320)
                assert values <= moved.host_bytes < 1.05 * values
        results.append((step.loss, gradients(model)))
    (loss, expected), (ours, found) = results
    assert torch.equal(loss, ours) and expected.keys() == found.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Int8DynamicActivationInt8", "Int8DynamicActivationIntx"])
def test_products_that_pass_no_gradient_are_refused(kind: str) -> None:
    base = LlamaForCausalLM(SHAPE)
    ao.quantize_(base.model, getattr(ao, f"{kind}WeightConfig")())
    with pytest.raises(
        oomb.UnsupportedModelError,
        match=r"q_proj.*passes no gradient.*Int8WeightOnlyConfig\(\).*4 bits of bitsandbytes",
    ):
        oomb.Engine(get_peft_model(base, LoraConfig(**LORA)))


def test_a_quantized_embedding_is_refused() -> None:
    base = LlamaForCausalLM(SHAPE)
    ao.quantize_(
        base.model, FORMATS["4 bits in a byte"](), lambda m, _: isinstance(m, nn.Embedding)
    )
    with pytest.raises(oomb.UnsupportedModelError, match=r"embed_tokens.weight: .*got a Embedding"):
        oomb.Engine(base)


def test_a_quantized_weight_that_requires_a_gradient_is_refused() -> None:
    model = adapted("int8")
    model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.requires_grad_(True)
    with pytest.raises(oomb.UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj.*freeze it"):
        oomb.Engine(model)


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_a_plan_counts_what_a_call_allocates(recompute: Any) -> None:
    """Unpacked weights of several layers would be more than all the rest."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 2048}
    model = adapted("int8", shape=LlamaConfig(**SHAPE.to_dict() | sizes | {"head_dim": 128}))
    config = oomb.Config(chunk_size=32, page_size=32, recompute=recompute)
    predicted = Planner(model, Machine.here("cpu")).predict(
        129, config, optimizer=None, timed=False
    )
    ids = IDS[:1, :129]
    with oomb.Engine(model, config) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    assert predicted.call_bytes + predicted.list_bytes == pytest.approx(measured, rel=0.05)


def test_a_plan_without_weights_counts_what_torchao_takes() -> None:
    lora = LoraConfig(**LORA, task_type="CAUSAL_LM")
    bare = bare_model(SHAPE, dtype=torch.bfloat16, adapter=lora, quantization="int8")
    predictions = [
        Planner(model, Machine.described(gpu="h200")).predict(
            4096, oomb.Config(recompute="layer"), timed=False, dry_run=False
        )
        for model in (bare, adapted("int8", torch.bfloat16))
    ]
    described, real = predictions
    assert described.parameter_bytes == pytest.approx(real.parameter_bytes, rel=1e-3)
    assert described.movable_bytes == real.movable_bytes
    # Adapters of a model with weights are in fp32 here, and peft's copy what a layer gives.
    assert described.call_bytes == pytest.approx(real.call_bytes, rel=0.05)
