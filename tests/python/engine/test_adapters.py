"""LoRA in fp32 beside layers in bf16, by products in bf16: as PEFT's own forward, without casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from oomb import _C
from oomb.model import causal
from oomb.model.adapters import Products, adapter_forwards

from .models import VOCABULARY, make
from .reference import relative_error

ROWS, INPUTS, OUTPUTS = 70, 96, 80


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


def adapted(bias: bool = True, more: Sequence[str] = (), **settings: Any) -> Any:
    """A layer in bf16 whose adapters are in fp32, and not zero."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=12, target_modules=["linear"], **settings)
    model = get_peft_model(Layer(bias).bfloat16(), config)  # type: ignore[arg-type]
    for name in more:
        model.add_adapter(name, config)
    layer = model.base_model.model.linear
    layer.set_adapter(["default", *more])
    for name, parameter in layer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return layer


def four_bits(layer: Any, kind: str = "nf4", double: bool = True, **settings: Any) -> Any:
    """The same with a base of bitsandbytes that unpacks to bf16."""
    bnb = pytest.importorskip("bitsandbytes")
    base = layer.base_layer
    settings = {"compute_dtype": torch.bfloat16, **settings}
    packed = bnb.nn.Linear4bit(INPUTS, OUTPUTS, bias=base.bias is not None, **settings)
    packed.weight = bnb.nn.Params4bit(
        base.weight.data,
        requires_grad=False,
        quant_type=kind,
        compress_statistics=double,
        blocksize=32,
        module=packed,
    )
    packed.bias = base.bias
    layer.base_layer = packed.to("cpu").requires_grad_(False)
    return layer


def unpacked(layer: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.base_layer.weight
    state = getattr(weight, "quant_state", None)
    return weight.detach() if state is None else dequantize_4bit(weight.data, state)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS // 2, INPUTS, generator=generator).bfloat16().requires_grad_()
    return x, torch.randn(2, ROWS // 2, OUTPUTS, generator=generator).bfloat16()


def run(layer: Any, forward: Any, x: torch.Tensor, d_y: torch.Tensor) -> dict[str, torch.Tensor]:
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    y = forward(x)
    d_x, d_a, d_b = torch.autograd.grad(y, (x, a, b), d_y)
    return {"y": y.detach(), "d_x": d_x, "d_a": d_a, "d_b": d_b}


def exact(layer: Any, x: torch.Tensor, d_y: torch.Tensor) -> dict[str, torch.Tensor]:
    """In fp64, by the formula."""
    x, d_y = (t.detach().double().reshape(-1, t.shape[-1]) for t in (x, d_y))
    w = unpacked(layer).double()
    a, b = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
    s = layer.scaling["default"]
    y = x @ w.t() + s * x @ a.t() @ b.t()
    if layer.base_layer.bias is not None:
        y = y + layer.base_layer.bias.detach().double()
    return {
        "y": y,
        "d_x": d_y @ w + s * d_y @ b @ a,
        "d_a": s * (d_y @ b).t() @ x,
        "d_b": s * d_y.t() @ (x @ a.t()),
    }


def fast(layer: Any) -> Any:
    (forward,) = adapter_forwards(nn.ModuleList([layer]), Products()).values()
    return forward


def as_near_as_pefts_own(layer: Any) -> None:
    x, d_y = inputs()
    expected = exact(layer, x, d_y)
    ours, theirs = run(layer, fast(layer), x, d_y), run(layer, layer.forward, x, d_y)
    for name, value in expected.items():
        found, beside = (
            relative_error(r[name].double().reshape(value.shape), value) for r in (ours, theirs)
        )
        # Gradients of the adapter are in fp32, where the products' 2^-16 shows.
        limit = 1.05 * beside if name in ("y", "d_x") else 2e-5
        assert found <= limit, (name, found, beside)
        assert ours[name].dtype == theirs[name].dtype


@pytest.mark.parametrize("trained_base", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("bias", [False, True])
def test_as_near_as_pefts_own(bias: bool, trained_base: bool) -> None:
    layer = adapted(bias)
    layer.base_layer.requires_grad_(trained_base)
    as_near_as_pefts_own(layer)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_four_bits_as_near_as_pefts_own(kind: str, double: bool, bias: bool) -> None:
    layer = four_bits(adapted(bias), kind, double)
    assert "AdaptedPacked" in type(fast(layer)(inputs()[0]).grad_fn).__name__
    as_near_as_pefts_own(layer)


@pytest.mark.parametrize("name", ["fp32", "hook", "patched", "bias in fp32"])
def test_other_layers_in_four_bits_run_by_themselves(name: str) -> None:
    """Theirs is all that multiplies, once, and the adapter is added to it."""
    layer = four_bits(adapted(), compute_dtype=torch.float32 if name == "fp32" else torch.bfloat16)
    base = layer.base_layer
    if name == "hook":
        base.register_forward_hook(lambda m, args, y: 2 * y)
    if name == "patched":
        base.forward = lambda x: torch.ones(*x.shape[:-1], OUTPUTS, dtype=x.dtype)
    if name == "bias in fp32":
        base.bias.data = base.bias.data.float()
    x, _ = inputs()
    added, y = fast(layer)(x), base(x)
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    expected = y.float() + layer.scaling["default"] * b(a(x.float()))
    assert relative_error(added.double(), expected.double()) < 3e-3
    assert "Packed" not in type(added.grad_fn).__name__


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_a_row_factor_has_torchs_bits(rows: int) -> None:
    halves = torch.randn(rows, 2 * 5, generator=torch.Generator().manual_seed(3))
    u = (halves[:, :5] + halves[:, 5:]) * 0.37
    first = u.bfloat16()
    expected = torch.cat([first, first, (u - first).bfloat16()], 1)
    assert torch.equal(Products().row_factor(halves, 0.37), expected)


@pytest.mark.parametrize(
    ("halves", "factor", "message"),
    [
        (torch.zeros(4, 5), torch.zeros(4, 6).bfloat16(), "halves: expected an even number"),
        (torch.zeros(4, 6), torch.zeros(4, 6).bfloat16(), "factor: expected .*4, 9"),
        (torch.zeros(4, 4), torch.zeros(4, 6), "factor: expected bfloat16"),
        (torch.zeros(4, 4).double(), torch.zeros(4, 6).bfloat16(), "halves: expected float32"),
        (torch.zeros(4, 4).t(), torch.zeros(4, 6).bfloat16(), "halves: expected .*contiguous"),
    ],
)
def test_factors_of_other_sizes(halves: Any, factor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.row_factor(halves=halves, factor=factor, scale=1.0)


CASES: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.5},
    "dora": {"use_dora": True},
    "bias of B": {"lora_bias": True},
}


@pytest.mark.parametrize("name", [*CASES, "disabled", "merged", "fp32", "hook", "patched", "two"])
def test_other_calls_have_pefts_own_bits(name: str) -> None:
    layer = adapted(**CASES.get(name, {}))
    x, _ = inputs()
    if name == "disabled":
        layer.enable_adapters(False)
    if name == "merged":
        layer.merge()
    if name == "fp32":
        layer.float()
        x = x.detach().float()
    if name == "hook":
        layer.lora_A["default"].register_forward_hook(lambda m, args, y: 2 * y)
    if name == "patched":
        layer.lora_B["default"].forward = lambda u: torch.ones(*u.shape[:-1], OUTPUTS)
    if name == "two":
        layer = adapted(more=("other",))
    forward = fast(layer)
    torch.manual_seed(3)
    found = forward(x)
    torch.manual_seed(3)
    assert torch.equal(found, layer(x))
    assert found.grad_fn is None or "Adapted" not in type(found.grad_fn).__name__


def test_autocast_has_pefts_own_bits() -> None:
    layer = adapted()
    x, d_y = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(layer, fast(layer), x, d_y), run(layer, layer.forward, x, d_y)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_an_engines_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to fp32 as those of PEFT's own forward; sums over chunks, recomputed layers."""
    monkeypatch.setattr(causal, "device_multiplies_wide", lambda device: True)
    ids = torch.randint(VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(2))

    def model(dtype: torch.dtype) -> Any:
        torch.manual_seed(4)
        base = make("qwen2", dtype)
        settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        made = get_peft_model(base, settings)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return made.eval()

    def gradients(made: Any) -> dict[str, torch.Tensor]:
        return {n: p.grad.double() for n, p in made.named_parameters() if p.grad is not None}

    rounded, true = model(torch.bfloat16), model(torch.float32)
    true.load_state_dict(rounded.state_dict())
    true(input_ids=ids, labels=ids).loss.backward()
    rounded(input_ids=ids, labels=ids).loss.backward()
    expected, beside = gradients(true), gradients(rounded)
    for recompute in ("none", "layer"):
        rounded.zero_grad()
        config = oomb.Config(chunk_size=32, page_size=16, recompute=recompute)  # type: ignore[arg-type]
        with oomb.Engine(rounded, config) as engine:
            engine.forward_backward(ids, ids)
        found = gradients(rounded)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            limit = 2 * relative_error(beside[name], value) + 1e-4
            assert relative_error(found[name], value) < limit, name
