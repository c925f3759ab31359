"""Pages of latents give what one ordinary backward gives, in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import oomb
from oomb.core.main_grad import MainGrads
from oomb.model.fused import replaced_forwards
from oomb.model.latent import Expansion, Latent, divided_expansions, latent_width
from oomb.model.linear import summed_forwards
from oomb.model.swap import Swaps

from .latent_models import IDS, LATENT, adapted, config, make_latent, widths, with_both
from .layer_classes import only_upper_half
from .recurrent_models import nothing_rounds_to_float32
from .reference import (
    EXACT,
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
)
from .test_documents import document_ids, one_by_one


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


# Exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("name", LATENT)
@pytest.mark.sampled(8)
def test_equals_one_backward(name: str, recompute: str) -> None:
    model = make_latent(name)
    assert set(widths(model)) == {LATENT[name][2]}
    expected = ordinary(model, IDS, IDS)
    assert_equal(chunked(model, config(recompute=recompute), IDS, IDS), expected)


@pytest.mark.parametrize("tokens", [16, 17, 33, 34, 35, 36, 48, 64, 65, 66, 67])
def test_tails_of_every_length(tokens: int) -> None:
    """The last token predicts nothing and is not run: tails of 0 to 3 tokens, and whole chunks."""
    model, ids = make_latent("small"), random_ids(1, tokens)
    assert_equal(chunked(model, config(), ids, ids), ordinary(model, ids, ids))


def test_many_pages_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for two pages of two sequences, so that every wave is parted."""
    model, expected = make_latent("minicpm3"), None
    for scratch in (2048, 40):
        monkeypatch.setattr("oomb.core.latent_groups.SCRATCH_TOKENS", scratch)
        found = chunked(model, config(chunk_size=32), IDS, IDS)
        if expected is not None:
            assert_identical(found, expected)
        expected = found
    assert expected is not None
    assert_equal(expected, ordinary(model, IDS, IDS))


@pytest.mark.parametrize("lengths", [(13, 30, 32), (8, 24, 40, 3), (1, 20, 1, 1, 30)])
def test_documents(lengths: tuple[int, ...]) -> None:
    model, ids = make_latent("small"), random_ids(1, sum(lengths))
    found = chunked(model, config(), ids, ids, document_ids=document_ids(lengths))
    assert_equal(found, one_by_one(model, ids, lengths))


@pytest.mark.parametrize("shorter", [1, 9, 40, 70])
def test_padding(shorter: int) -> None:
    model, ids = make_latent("small"), IDS.clone()
    mask = torch.ones_like(ids)
    mask[1, shorter:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = chunked(model, config(), ids, labels, attention_mask=mask)
    assert_equal(found, ordinary(model, ids, labels, attention_mask=mask))


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_adapters_of_the_expansion(recompute: str) -> None:
    model = adapted(make_latent("small"))
    assert set(widths(model)) == {24}
    expected = ordinary(model, IDS, IDS)
    assert all("kv_b_proj.lora_" in name for name in expected.gradients)
    assert_equal(chunked(model, config(recompute=recompute), IDS, IDS), expected)


def test_weights_of_upper_layers_alone() -> None:
    model = make_latent("small")
    only_upper_half(model)
    assert_equal(chunked(model, config(), IDS, IDS), ordinary(model, IDS, IDS))


def test_weights_of_the_expansion_alone() -> None:
    """The lowest one gets gradient, though no latent below it wants any."""
    model = make_latent("small")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("kv_b_proj" in name)
    assert_equal(chunked(model, config(), IDS, IDS), ordinary(model, IDS, IDS))


def test_kept_outputs() -> None:
    model = make_latent("small")
    expected = ordinary(model, IDS, IDS)
    for recompute in ("none", "layer"):
        found = chunked(model, config(keep_outputs="all", recompute=recompute), IDS, IDS)
        assert found.step is not None
        assert found.step.stats.kept_output_share == 1.0
        assert_equal(found, expected)


def test_evaluate_and_two_passes() -> None:
    model = make_latent("small")
    expected = ordinary(model, IDS, IDS)
    with oomb.Engine(model, config()) as engine:
        assert relative_error(engine.evaluate(IDS, IDS).loss, expected.loss) <= EXACT
        with engine.two_pass(IDS, IDS) as call:
            loss = -call.logprobs.sum() / (2 * 74)
            loss.backward()
            call.sweep()
    assert_equal(Result(loss.detach(), take_gradients(model)), expected)


def test_rows_that_begin_alike() -> None:
    model, ids = make_latent("small"), IDS.clone()
    ids[1, :41] = ids[0, :41]
    expected = ordinary(model, ids, ids)
    with (
        oomb.Engine(model, config()) as engine,
        engine.two_pass(ids, ids, share_prefixes=True) as call,
    ):
        loss = -call.logprobs.sum() / (2 * 74)
        loss.backward()
        call.sweep()
    assert_equal(Result(loss.detach(), take_gradients(model)), expected)


@pytest.mark.parametrize(
    "rule",
    [
        oomb.TruncatedChunks(window=1),
        oomb.TruncatedChunks(window=2),
        oomb.SampledChunks(keep=0.6, seed=3),
    ],
    ids=str,
)
def test_rules_of_the_backward_do_what_they_do_on_keys_and_values(rule: Any) -> None:
    ours, theirs = with_both(make_latent("small"), config(backward=rule))
    assert_equal(ours, theirs)


# Pages of keys and values ---------------------------------------------------------------------


def test_page_rules_choose_by_keys() -> None:
    model = make_latent("small")
    assert set(widths(model, attention=oomb.TopKPages(budget=2))) == {0}
    many = config(attention=oomb.TopKPages(budget=100))
    assert_equal(chunked(model, many, IDS, IDS), ordinary(model, IDS, IDS))


def test_dropout_in_the_expansion_is_not_drawn_twice_alike() -> None:
    assert set(widths(adapted(make_latent("small"), dropout=0.1))) == {0}


def changed_behind(attention: Any) -> Any:
    """What attention gets is not what came out of the expansion."""
    stock = attention.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        made = attention.expand_kv

        def expand_kv(latent: torch.Tensor, rotated: torch.Tensor) -> Any:
            k, v = made(latent, rotated)
            return k + 1, v

        attention.expand_kv = expand_kv
        try:
            return stock(*args, **keywords)
        finally:
            attention.expand_kv = made

    return forward


# Some heads alone -----------------------------------------------------------------------------


class Expanding(nn.Module):
    """Keys [nope + rope] and values of four heads, from latents of 5 numbers."""

    def __init__(self, order: str = "head by head") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kv_b_proj = nn.Linear(5, 4 * (3 + 2), dtype=torch.float64)
        self.order = order

    def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
        kv = self.kv_b_proj(latent[:, 0])
        if self.order == "head by head":
            kv = kv.unflatten(-1, (-1, 5))
        else:  # each number of all heads
            kv = kv.unflatten(-1, (5, -1)).transpose(-1, -2)
        k, v = kv.transpose(1, 2).split((3, 2), -1)
        return torch.cat((k, rotated.expand(-1, k.shape[1], -1, -1)), -1), v


def expansion_of(module: Expanding) -> Expansion:
    return Expansion(module, module.expand_kv, 5, 2, "cpu", False, torch.bfloat16)


@pytest.mark.parametrize("how", ["plain", "summed", "hooked"])
def test_heads_alone_are_made_by_their_rows(how: str) -> None:
    """Values and gradients of a slice of all heads; a layer with a hook makes all of them."""
    module, sums = Expanding(), MainGrads()
    if how == "hooked":
        module.kv_b_proj.register_forward_hook(lambda _, __, y: y * 2)
    inputs = [torch.randn(2, 1, 7, n, dtype=torch.float64, requires_grad=True) for n in (5, 2)]
    weights = [*module.parameters(), *inputs]
    k, v = (x[:, 1:3] for x in module.expand_kv(*inputs))
    expected = torch.autograd.grad(k.square().sum() + v.sum(), weights)
    with Swaps() as swaps:
        if how == "summed":
            swaps.also(replaced_forwards(summed_forwards(module, sums)))
        swaps.also(divided_expansions(module))
        with FlopCounterMode(display=False) as flops:
            ours = expansion_of(module).of_heads(1, 3, 4)(*inputs)
        assert flops.get_total_flops() == 2 * 2 * 7 * 5 * (20 if how == "hooked" else 10)
        for made, theirs in zip(ours, (k, v), strict=True):
            assert relative_error(made.detach(), theirs.detach()) <= EXACT
        (ours[0].square().sum() + ours[1].sum()).backward()
        assert module.expand_kv(*inputs)[0].shape[1] == 4
    found = [x.grad for x in weights]
    if how == "summed":
        assert found[0] is None
        found[0] = sums.get(module.kv_b_proj.weight)
    for gradient, theirs in zip(found, expected, strict=True):
        assert gradient is not None
        assert relative_error(gradient, theirs) <= EXACT


@pytest.mark.parametrize("order", ["head by head", "number by number"])
def test_an_expansion_whose_heads_are_no_rows_is_not_taken(order: str) -> None:
    module = Expanding(order)
    inputs = torch.randn(1, 1, 5, 5, dtype=torch.float64), torch.ones(1, 1, 5, 2).double()
    with divided_expansions(module):
        latent = Latent(expansion_of(module), *inputs)
        found = latent_width(latent, *module.expand_kv(*inputs), has_values=True)
    assert found == (7 if order == "head by head" else 0)


@pytest.mark.parametrize("what", ["places", "shapes", "nothing"])
def test_an_expansion_that_looks_at_more_than_a_token_is_not_taken(what: str) -> None:
    """At a place in its input, or not even giving the same shapes."""
    rank, rope = 4, 2

    def expand(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.cat((latent, rotated), -1).repeat(1, 3, 1, 1)
        if what == "places":
            k = k * (1 + torch.arange(k.shape[2])[:, None])
        return k, k[:, :, : -1 if what == "shapes" and bool(latent[0, 0, 0, 0] > 0) else None]

    inputs = torch.arange(5.0)[None, None, :, None].expand(1, 1, 5, rank), torch.ones(1, 1, 5, rope)
    expansion = Expansion(nn.Identity(), expand, rank, rope, "cpu", False, torch.bfloat16)
    found = latent_width(Latent(expansion, *inputs), *expand(*inputs), has_values=True)
    assert found == (rank + rope if what == "nothing" else 0)


def test_keys_that_are_changed_behind_the_expansion_are_stored() -> None:
    model = make_latent("small")
    attention = model.model.layers[1].self_attn
    attention.forward = changed_behind(attention)
    assert widths(model) == [24, 0]
    assert_equal(chunked(model, config(), IDS, IDS), ordinary(model, IDS, IDS))


def test_the_model_is_afterwards_as_it_was() -> None:
    model = make_latent("small")
    chunked(model, config(), IDS, IDS)
    assert not any("expand_kv" in vars(module) for module in model.modules())
