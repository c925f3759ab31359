"""Inputs of linear layers that backward makes again: the same bits, kept by nobody."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from oomb.model.host_weights import PLACES
from oomb.model.remade import keep, kept, remakable, remaking

from .models import make
from .reference import EXACT, ordinary, random_ids, relative_error, take_gradients
from .test_host_weights import CopiesInTheEnd

IDS = random_ids(2, 75)
MAKES: list[str] = []  # kinds of values that were made since the test began


class Norm(torch.autograd.Function):
    """As a kernel: keeps its input, and its backward leaves it as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        MAKES.append("norm")
        return weight * (x * _scale(x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        scale, d_normed = _scale(x), weight * grads[0]
        along = (d_normed * x).mean(-1, keepdim=True)
        d_x = scale * d_normed - x * scale**3 * along
        return d_x, (grads[0] * x * scale).flatten(0, -2).sum(0)


class Product(torch.autograd.Function):
    """As a kernel: its backward writes gradients in place of what it has kept."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        MAKES.append("product")
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (x.data for x in ctx.saved_tensors)
        s = torch.sigmoid(gate)
        d_gate = grads[0] * up * (s + gate * s * (1 - s))
        up.copy_(grads[0] * gate * s)
        return gate.copy_(d_gate), up


def _scale(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def forwards(decoder: nn.Module) -> dict[nn.Module, Any]:
    """Of norms and gates, as Liger's kernels have them on a GPU."""

    def norm(module: Any) -> Any:
        return lambda x: remakable(Norm.apply, x, module.weight)

    def gated(module: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            product = remakable(Product.apply, module.gate_proj(x), module.up_proj(x))
            result: torch.Tensor = module.down_proj(product)
            return result

        return forward

    kinds = {"LlamaRMSNorm": norm, "LlamaMLP": gated}
    return {
        module: kinds[type(module).__name__](module)
        for module in decoder.modules()
        if type(module).__name__ in kinds
    }


def gradients(model: Any, copies: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    MAKES.clear()
    config = oomb.Config(chunk_size=16, page_size=8, **settings)
    with oomb.Engine(model, config) as engine:
        engine._model._fused = forwards(engine._model.decoder)
        if copies is not None:
            assert engine._model.host_weights is not None
            engine._model.host_weights.copies = copies
        engine.forward_backward(IDS, IDS)
    return take_gradients(model)


def llama(adapted: bool, layers: int = 2) -> Any:
    model = make("llama", num_hidden_layers=layers)
    for parameter in model.parameters():  # norms other than by ones
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    if adapted:
        settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, settings).to(torch.float64)
    return model.eval()


@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_have_the_bits_of_kept_inputs(adapted: bool) -> None:
    model = llama(adapted)
    expected, kept_ones = gradients(model, recompute="none"), len(MAKES)
    found = gradients(model, recompute="pointwise")
    assert len(MAKES) > kept_ones
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name, gradient in ordinary(model, IDS, IDS).gradients.items():
        assert relative_error(found[name], gradient) <= EXACT, name


def test_weights_that_come_again_for_backward() -> None:
    """A norm's weight lies elsewhere then, and where it lay is another layer's, or nonsense."""
    model = llama(adapted=True, layers=2 * PLACES + 1)
    expected = gradients(model)
    found = gradients(model, CopiesInTheEnd(), weights="host", recompute="pointwise")
    assert expected
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_how_often_values_are_made_again() -> None:
    """Once for each linear layer that reads them: q, k, v, gate and up; and down."""
    model = make("llama", num_hidden_layers=3)
    gradients(model, recompute="none")
    once = Counter(MAKES)
    gradients(model, recompute="pointwise")
    chunks, layers = 5, 3  # of 74 tokens
    assert Counter(MAKES) - once == {"norm": chunks * layers * 5, "product": chunks * layers}


class Reader(torch.autograd.Function):
    """Twice its input, which it keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        keep(ctx, x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        ctx.seen(*kept(ctx))
        return 2 * grads[0]


def saved_by(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a reader saves of a value, and what it has in backward; once for a graph."""
    saved, seen = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = Reader.apply(value)
    result.grad_fn.seen = seen.append
    result.sum().backward()
    return saved[0], seen[0]


def test_a_value_changed_in_place_is_kept_itself() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1
    with remaking():
        value = remakable(torch.sin, x)
        changed = remakable(torch.sin, x.detach().requires_grad_() * 1).mul_(3)
    saved, seen = saved_by(value)
    assert saved.data_ptr() == x.data_ptr()
    assert torch.equal(seen, value)
    saved, seen = saved_by(changed)
    assert saved.data_ptr() == changed.data_ptr()
    assert torch.equal(seen, 3 * x.sin())


@pytest.mark.parametrize("why", ["no gradient", "not in one piece", "inside no_grad", "not asked"])
def test_where_a_value_is_kept_itself(why: str) -> None:
    x = torch.randn(4, 3, requires_grad=why != "no gradient") * 1
    source = x.t() if why == "not in one piece" else x
    asked = nullcontext() if why == "not asked" else remaking()
    with torch.set_grad_enabled(why != "inside no_grad"), asked:
        value = remakable(torch.exp, source)
    saved, _ = saved_by(value if value.requires_grad else value.requires_grad_())
    assert saved.data_ptr() == value.data_ptr()


def test_a_source_changed_before_it_is_kept() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1
    with remaking():
        value = remakable(torch.exp, x)
    x.mul_(2)  # of which exp, that keeps its result, knows nothing
    saved, seen = saved_by(value)
    assert saved.data_ptr() == value.data_ptr()
    assert torch.equal(seen, value)


def test_a_source_that_changes_is_told() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1
    with remaking():
        result = Reader.apply(remakable(torch.sin, x))
    result.grad_fn.seen = lambda _: None
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
