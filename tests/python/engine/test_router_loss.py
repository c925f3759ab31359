"""The load-balancing loss of mixtures of experts, against the model's own loss in fp64."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

import oomb

from .models import of
from .recurrent_models import make_recurrent
from .reference import (
    EXACT,
    Result,
    assert_equal,
    chunked,
    random_ids,
    relative_error,
    take_gradients,
)
from .router_models import FAMILIES, in_float64, routed, stock_loss
from .tiers import with_slots

CONFIG = oomb.Config(chunk_size=16, page_size=8)
IDS = random_ids(3, 75)
MASK = torch.ones_like(IDS)
MASK[1, 50:] = 0
MASK[2, 7:] = 0  # one chunk, and most of what is run is padding
PADDED = {"attention_mask": MASK}
LABELS = IDS.masked_fill(MASK == 0, -100)
LABELS[0, :20] = -100


def first_tokens(number: int) -> torch.Tensor:
    """Labels that end early: routers count what comes behind them too."""
    labels = IDS.clone()
    labels[:, number:] = -100
    return labels


@pytest.mark.parametrize("family", list(FAMILIES))
def test_equals_one_backward(family: str) -> None:
    model = routed(family)
    with in_float64(model):
        expected = stock_loss(model, IDS, LABELS, **PADDED)
        assert_equal(chunked(model, CONFIG, IDS, LABELS, **PADDED), expected)


# Documents begin at these positions; what would predict a first token is no target.
PLACES = torch.cat([torch.arange(n) for n in (30, 21, 24)]).repeat(3, 1)
INNER = IDS.masked_fill(PLACES == 0, -100)

CASES: dict[str, tuple[dict[str, Any], torch.Tensor, dict[str, Any]]] = {
    "without a mask": ({}, IDS, {}),
    "recomputed": ({"recompute": "layer"}, LABELS, PADDED),
    "one chunk": ({"chunk_size": 80}, LABELS, PADDED),
    "a last chunk of one token": ({"chunk_size": 74, "page_size": 2}, LABELS, PADDED),
    "chunks of one page": ({"chunk_size": 8}, LABELS, PADDED),
    "nothing kept": ({"keep_outputs": "none"}, LABELS, PADDED),
    "labels end early": ({}, first_tokens(9), {}),
    "divided by another number": ({}, LABELS, {**PADDED, "num_items_in_batch": 1000}),
    "documents": ({}, INNER, {"position_ids": PLACES}),
    "documents and padding": ({}, LABELS, {"position_ids": PLACES, **PADDED}),
    "all pages chosen": ({"attention": oomb.TopKPages(budget=64)}, LABELS, PADDED),
}


@pytest.mark.parametrize("case", list(CASES))
def test_is_exact_when(case: str) -> None:
    settings, labels, arguments = CASES[case]
    config = oomb.Config(**{"chunk_size": 16, "page_size": 8, **settings})
    model = routed()
    with in_float64(model):
        expected = stock_loss(model, IDS, labels, **arguments)
        assert_equal(chunked(model, config, IDS, labels, **arguments), expected)


def test_a_batch_without_targets_trains_its_routers() -> None:
    """As a micro-batch among others; what nothing reaches has no gradient in place of zeros."""
    model, labels = routed(), torch.full_like(IDS, -100)
    with in_float64(model):
        expected = stock_loss(model, IDS, labels, num_items_in_batch=7)
        found = chunked(model, CONFIG, IDS, labels, num_items_in_batch=7)
    for result in (found, expected):
        result.gradients = {n: g for n, g in result.gradients.items() if bool(g.any())}
    assert_equal(found, expected)


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj"], ["gate"]], ids=str)
def test_adapters(modules: Any) -> None:
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    if modules == ["gate"]:  # routers are parameters, not linear layers
        settings = peft.LoraConfig(
            r=4, target_modules=["k_proj"], modules_to_save=["gate"], init_lora_weights=False
        )
    inner = routed("Qwen3Moe")
    with in_float64(inner):
        model: Any = peft.get_peft_model(inner, settings).double()
        expected = stock_loss(model, IDS, LABELS, **PADDED)
        assert_equal(chunked(model, CONFIG, IDS, LABELS, **PADDED), expected)


def test_a_model_with_recurrent_layers() -> None:
    model = make_recurrent("qwen3-next", output_router_logits=True, router_aux_loss_coef=0.7)
    with in_float64(model):
        expected = stock_loss(model, IDS, LABELS, **PADDED)
        assert_equal(chunked(model, CONFIG, IDS, LABELS, **PADDED), expected)


def test_pages_that_spill() -> None:
    model = routed()
    settings = {"chunk_size": 16, "page_size": 8}
    with in_float64(model):
        expected = stock_loss(model, IDS, LABELS, **PADDED)
        found = with_slots(model, settings, 16, IDS, LABELS, **PADDED)
    assert found.step is not None and found.step.stats.d2h_bytes > 0
    assert_equal(found, expected)


def test_several_calls_of_one_engine_add_up() -> None:
    """Each call counts its own choices, and reads the coefficient anew as the model does."""
    model = routed()
    with in_float64(model), oomb.Engine(model, CONFIG) as engine:
        parts = [
            ({"input_ids": IDS[:2, :40], "labels": IDS[:2, :40]}, 0.7),
            ({"input_ids": IDS, "labels": LABELS, **PADDED}, 0.2),
        ]
        model.zero_grad()
        losses = []
        for arguments, coefficient in parts:
            model.router_aux_loss_coef = coefficient
            losses.append(engine.forward_backward(**arguments, num_items_in_batch=150).loss)
        found = Result(torch.stack(losses).sum(), take_gradients(model))
        stock = []
        for arguments, coefficient in parts:
            model.router_aux_loss_coef = coefficient
            own = model(**arguments, num_items_in_batch=150, use_cache=False)
            own.loss.backward()
            stock.append(own.loss.detach())
        assert_equal(found, Result(torch.stack(stock).sum(), take_gradients(model)))


@pytest.mark.parametrize("labels", [LABELS, first_tokens(9)], ids=["padded", "early"])
def test_evaluation(labels: torch.Tensor) -> None:
    model = routed("Qwen3Moe")
    arguments: Any = PADDED if labels is LABELS else {}
    seen: list[int] = []
    with in_float64(model), oomb.Engine(model, CONFIG) as engine:
        expected = stock_loss(model, IDS, labels, **arguments).loss
        found = [
            engine.evaluate(IDS, labels, **arguments),
            engine.evaluate(IDS, labels, **arguments, return_logprobs=True),
            engine.evaluate(
                IDS, labels, **arguments, on_logits=lambda _, x: seen.append(x.shape[1])
            ),
        ]
    assert all(relative_error(step.loss, expected) <= EXACT for step in found)
    assert sum(seen) == IDS.shape[1]
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_of_each_token_stands_beside_it() -> None:
    model = routed()
    with in_float64(model), oomb.Engine(model, CONFIG) as engine:
        nothing = engine.forward_backward(
            IDS, LABELS, **PADDED, token_loss=lambda logits, _: 0.0 * logits[:, 0]
        )
        found = Result(nothing.loss, take_gradients(model))
        own = model(input_ids=IDS, **PADDED, use_cache=False)
        loss = 0.7 * own.aux_loss + 0.0 * own.logits.sum()
        loss.backward()
        assert_equal(found, Result(loss.detach(), take_gradients(model)))


def test_stock_sums_in_float32_are_met_to_their_rounding() -> None:
    """In bf16, where transformers compares probabilities that are rounded."""
    model = routed(dtype=torch.bfloat16)
    with oomb.Engine(model, oomb.Config(chunk_size=80, page_size=8)) as engine:
        whole = engine.evaluate(IDS, LABELS, **PADDED).loss
    own = model(input_ids=IDS, labels=LABELS, **PADDED, use_cache=False)
    assert relative_error(whole.double(), own.loss.detach().double()) <= 3e-3


def test_dropout_draws_alike_in_both_passes() -> None:
    """What is counted in the fill is what the sweep goes through."""
    model = routed("Qwen3Moe")
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj"], lora_dropout=0.3, init_lora_weights=False
    )
    adapted: Any = peft.get_peft_model(model, settings).double().train()
    losses = []
    for recompute in ("none", "layer"):
        torch.manual_seed(3)
        config = oomb.Config(chunk_size=16, page_size=8, recompute=recompute)  # type: ignore[arg-type]
        losses.append(chunked(adapted, config, IDS, LABELS, **PADDED))
    assert_equal(losses[1], losses[0])


@pytest.mark.parametrize("tokens", [64, 65, 75])
def test_the_plan_has_the_last_token(tokens: int) -> None:
    ids, seen = random_ids(1, tokens), set()
    with oomb.Engine(routed(), CONFIG) as engine:
        planned = engine._calls.planned_chunks(CONFIG, tokens).number
        assert engine.plan(tokens).fits
        engine.forward_backward(ids, ids, on_progress=lambda x: seen.add((x.phase, x.num_chunks)))
    assert seen == {("fill", planned), ("sweep", planned)}


def test_the_model_collects_its_outputs_once_afterwards() -> None:
    """The check at construction makes transformers install hooks."""
    model = routed()
    for _ in range(2):
        chunked(model, CONFIG, IDS, LABELS, **PADDED)
    own = model(input_ids=IDS, output_hidden_states=True, use_cache=False)
    assert (len(own.router_logits), len(own.hidden_states)) == (3, 4)


REFUSED_SETTINGS: dict[str, oomb.Config] = {
    "SampledChunks": oomb.Config(backward=oomb.SampledChunks(keep=0.5)),
    "TruncatedChunks": oomb.Config(backward=oomb.TruncatedChunks(window=2)),
}


@pytest.mark.parametrize("name", list(REFUSED_SETTINGS))
def test_a_backward_that_is_not_whole_is_refused(name: str) -> None:
    with pytest.raises(oomb.UnsupportedModelError, match=f"router auxiliary loss.*got {name}"):
        oomb.Engine(routed(), REFUSED_SETTINGS[name])


def test_calls_that_have_no_place_for_it_are_refused() -> None:
    model = routed()
    with oomb.Engine(model, CONFIG) as engine:
        with pytest.raises(oomb.UnsupportedModelError, match="two_pass: .*router auxiliary loss"):
            engine.two_pass(IDS)
        with pytest.raises(ValueError, match="labels: expected at least one token to predict"):
            engine.forward_backward(IDS, torch.full_like(IDS, -100))
        with pytest.raises(oomb.UnsupportedModelError, match="pixel_values: .*router auxiliary"):
            engine.forward_backward(IDS, IDS, pixel_values=torch.zeros(1))
        model.config.output_router_logits = False
        with pytest.raises(ValueError, match="output_router_logits: expected True, as when"):
            engine.forward_backward(IDS, IDS)
        with pytest.raises(ValueError, match="output_router_logits: expected True, as when"):
            engine.evaluate(IDS, IDS)
    assert all(p.grad is None for p in model.parameters())
    with oomb.Engine(model, CONFIG) as engine:
        model.config.output_router_logits = True
        with pytest.raises(ValueError, match="output_router_logits: expected False, as when"):
            engine.forward_backward(IDS, IDS)


def sums_the_layers() -> Any:
    """Adds what it would add for each layer, as some models do."""
    model = routed()
    inner = model.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        own = inner(*arguments, **keywords)
        own.aux_loss = 3 * own.aux_loss
        return own

    model.forward = forward
    return model


def another_coefficient() -> Any:
    """Its own forward weighs the term by something else."""
    model = routed()
    inner = model.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        own = inner(*arguments, **keywords)
        if own.loss is not None:
            own.loss = own.loss + own.aux_loss
        return own

    model.forward = forward
    return model


def tells_of_none() -> Any:
    return of("Llama", output_router_logits=True, router_aux_loss_coef=0.1, num_experts_per_tok=1)


def classifies() -> Any:
    return routed(model="MixtralForSequenceClassification", num_labels=3)


OTHER_LOSSES = {
    classifies: "its head classifies sequences",
    sums_the_layers: "its forward gives .* where that is",
    another_coefficient: "with a coefficient of 1 its loss is",
    tells_of_none: "its own forward",
}


@pytest.mark.parametrize("build", list(OTHER_LOSSES), ids=lambda f: f.__name__)
def test_another_loss_of_routers_is_refused(build: Any) -> None:
    model = build()
    before = model.config.router_aux_loss_coef
    with pytest.raises(oomb.UnsupportedModelError, match=OTHER_LOSSES[build]):
        oomb.Engine(model, CONFIG)
    assert getattr(model, "router_aux_loss_coef", before) == before
