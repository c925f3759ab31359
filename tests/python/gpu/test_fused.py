"""Norms, gates, rotations and LoRA by faster forwards: gradients are those of the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import gradients
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from engine.models import VOCABULARY, of
from engine.reference import relative_error
from oomb.model.adapters import Products, adapter_forwards
from oomb.model.causal import CausalModel

pytestmark = pytest.mark.gpu
_SIZES = {"head_dim": 64, "hidden_size": 192, "intermediate_size": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"attn_logit_softcapping": None},
    "Gemma3": {"config": "Gemma3TextConfig", "sliding_window": 200},
    "Gemma4": {
        "config": "Gemma4TextConfig",
        "global_head_dim": 128,
        "sliding_window": 200,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 200},
    "Olmo3": {"sliding_window": 200},
    "Qwen3Moe": _EXPERTS,
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (1, 1000), generator=generator).cuda()


def made(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = of(family, **{**_SIZES, **FAMILIES[family]})
    return model.to("cuda", dtype)


def chunked(model: Any, **settings: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    config = oomb.Config(chunk_size=256, page_size=64, **settings)
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids(), ids())
    return gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_that_of_the_models_own_forwards(family: str) -> None:
    pytest.importorskip("liger_kernel")
    model = made(family, torch.float32)
    assert CausalModel(model).is_fused
    found = chunked(model)
    model.zero_grad()
    model(input_ids=ids(), labels=ids()).loss.backward()
    for name, gradient in gradients(model).items():
        assert relative_error(found[name], gradient) < 2e-5, name


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_that_are_made_again_have_the_bits_of_kept_ones(family: str, adapted: bool) -> None:
    pytest.importorskip("liger_kernel")
    model = made(family, torch.bfloat16)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    found, expected = (chunked(model, recompute=one) for one in ("pointwise", "none"))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_what_is_made_again_takes_no_memory() -> None:
    """Two norms and the product of each layer; in backward those of one layer are there again."""
    pytest.importorskip("liger_kernel")
    hidden, inner, layers, tokens = 1024, 4096, 8, 4096
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = of("Llama", **heads, **sizes).to("cuda", torch.bfloat16)
    some = torch.randint(VOCABULARY, (1, 2 * tokens + 1), device="cuda")

    def peak(recompute: Any) -> int:
        config = oomb.Config(chunk_size=tokens, recompute=recompute)
        with oomb.Engine(model, config) as engine:
            engine.forward_backward(some, some)
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            engine.forward_backward(some, some)
            model.zero_grad()
        return torch.cuda.max_memory_allocated()

    of_layer = 2 * tokens * (2 * hidden + inner)
    less = peak("none") - peak("pointwise")
    assert less == pytest.approx(layers * of_layer, abs=1.5 * of_layer)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3Moe"])
def test_lora_in_bf16_is_as_far_from_fp32_as_pefts_own(family: str) -> None:
    def adapted(dtype: torch.dtype) -> Any:
        settings = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(made(family, dtype), settings)
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    model, exact = adapted(torch.bfloat16), adapted(torch.float32)
    exact.load_state_dict(model.state_dict())
    assert adapter_forwards(model, Products())
    exact(input_ids=ids(), labels=ids()).loss.backward()
    model(input_ids=ids(), labels=ids()).loss.backward()
    expected, beside = gradients(exact), gradients(model)
    found = chunked(model)
    for name, gradient in expected.items():
        limit = 2 * relative_error(beside[name], gradient) + 1e-4
        assert relative_error(found[name], gradient) < limit, name


@pytest.mark.parametrize(("rows", "rank"), [(0, 8), (1, 1), (37, 3), (4096, 16), (70000, 64)])
def test_a_row_factor_has_the_cpus_bits(rows: int, rank: int) -> None:
    halves = torch.randn(rows, 2 * rank, generator=torch.Generator().manual_seed(3)) * 1e3
    expected = Products().row_factor(halves, 0.37)
    assert torch.equal(Products().row_factor(halves.cuda(), 0.37).cpu(), expected)


@pytest.mark.parametrize("rows", [100, 2000])  # few go through a kernel that unpacks as it goes
@pytest.mark.parametrize("double", [True, False])
def test_lora_on_four_bits_is_as_far_from_wide_arithmetic_as_pefts_own(
    double: bool, rows: int
) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(4)
    inputs, outputs = 1024, 512
    base = bnb.nn.Linear4bit(
        inputs,
        outputs,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        compress_statistics=double,
    )
    base.bias.data = torch.randn(outputs).bfloat16()
    model = get_peft_model(
        nn.ModuleDict({"linear": base.bfloat16().cuda()}).requires_grad_(False),  # type: ignore[arg-type]
        LoraConfig(r=8, lora_alpha=12, target_modules=["linear"]),
    )
    layer: Any = model.base_model.model["linear"]  # type: ignore[index]
    a, b = (m["default"].weight for m in (layer.lora_A, layer.lora_B))
    nn.init.normal_(b, std=0.1)
    x = torch.randn(rows, inputs, device="cuda").bfloat16().requires_grad_()
    d_y = torch.randn(rows, outputs, device="cuda").bfloat16()
    (forward,) = adapter_forwards(model, Products()).values()

    def run(forward: Any) -> list[torch.Tensor]:
        y = forward(x)
        return [y.detach(), *torch.autograd.grad(y, (x, a, b), d_y)]

    w = bnb.functional.dequantize_4bit(base.weight.data, base.weight.quant_state).double()
    wide_a, wide_b, s = a.detach().double(), b.detach().double(), layer.scaling["default"]
    wide_x, wide_d = x.detach().double(), d_y.double()
    expected = [
        wide_x @ w.t() + base.bias.double() + s * wide_x @ wide_a.t() @ wide_b.t(),
        wide_d @ w + s * wide_d @ wide_b @ wide_a,
        s * (wide_d @ wide_b).t() @ wide_x,
        s * wide_d.t() @ (wide_x @ wide_a.t()),
    ]
    assert "AdaptedPacked" in type(forward(x).grad_fn).__name__
    ours, theirs = run(forward), run(layer)
    for number, value in enumerate(expected):
        found, beside = (relative_error(r[number].double(), value) for r in (ours, theirs))
        assert found <= (1.05 * beside if number < 2 else 2e-5), (number, found, beside)
