"""Mistakes between two passes: each is named, and no gradient changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from oomb.engine.two_pass import TwoPass

from .models import make
from .two_pass_losses import (
    CONFIG,
    IDS,
    LABELS,
    MASK,
    dpo,
    two_passes,
)


@pytest.fixture
def model() -> PreTrainedModel:
    model = make("llama")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    return model


def unchanged(model: PreTrainedModel) -> bool:
    return all(p.grad is not None and bool((p.grad == 7).all()) for p in model.parameters())


def backward(call: TwoPass) -> None:
    call.logprobs.sum().backward()


def without_gradients(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    call.sweep()


def past_the_leaves(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    (call.logprobs.sum() + model(input_ids=IDS).logits.sum()).backward()


def changed_parameters(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    backward(call)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.0)  # type: ignore[union-attr, operator]
    call.sweep()


def another_mode(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    backward(call)
    model.train(not model.training)
    call.sweep()


def fewer_parameters(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    backward(call)
    model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    call.sweep()


def entered_again(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    with call:
        pass


def of_a_closed_engine(model: PreTrainedModel, engine: oomb.Engine, call: TwoPass) -> None:
    backward(call)
    engine.close()
    call.sweep()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (without_gradients, "call.sweep: expected a gradient on call.logprobs, got none"),
        (past_the_leaves, r"two_pass: expected a loss of .* got one that reaches lm_head"),
        (changed_parameters, "call.sweep: expected the parameters of the fill"),
        (fewer_parameters, "call.sweep: expected the parameters of the fill"),
        (another_mode, "call.sweep: expected the model in the mode of the fill, eval()"),
        (entered_again, "two_pass: expected a call that was not begun"),
        (of_a_closed_engine, "engine: expected an open engine"),
    ],
)
def test_mistakes_between_the_passes(
    model: PreTrainedModel, mistake: Callable[..., None], message: str
) -> None:
    engine = oomb.Engine(model.eval(), CONFIG)
    with (
        engine.two_pass(IDS, LABELS, attention_mask=MASK) as call,
        pytest.raises(oomb.Error, match=message),
    ):
        mistake(model, engine, call)
    assert unchanged(model)


def test_a_call_between_the_passes_hides_no_mistake(model: PreTrainedModel) -> None:
    with oomb.Engine(model.eval(), CONFIG) as engine:
        with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
            for _ in range(2):
                engine.evaluate(IDS, LABELS)
                with pytest.raises(oomb.Error, match="got one that reaches lm_head"):
                    past_the_leaves(model, engine, call)
            with engine.two_pass(IDS, LABELS) as inner:
                backward(inner)
                inner.sweep()  # which meets no hook of the outer one
        assert not any(p._backward_hooks for p in model.parameters())


def test_one_sweep_of_each_call(model: PreTrainedModel) -> None:
    with oomb.Engine(model, CONFIG) as engine:
        with engine.two_pass(IDS, LABELS) as call:
            backward(call)
        with pytest.raises(oomb.Error, match="call.sweep: expected one inside its with block"):
            call.sweep()
        assert unchanged(model)
        new = engine.two_pass(IDS, LABELS)
        with pytest.raises(oomb.Error, match="call.sweep: expected one whose values were taken"):
            new.sweep()
        with new as call:
            backward(call)
            call.sweep()
            after = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with pytest.raises(oomb.Error, match="call.sweep: expected one that was not swept"):
                call.sweep()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), after, strict=True))  # type: ignore[arg-type]


def test_after_an_error_in_the_sweep(model: PreTrainedModel) -> None:
    def on_progress(progress: oomb.Progress) -> None:
        if progress.phase == "sweep":
            raise KeyboardInterrupt

    with oomb.Engine(model, CONFIG) as engine:
        with engine.two_pass(IDS, LABELS, on_progress=on_progress) as call:
            backward(call)
            with pytest.raises(KeyboardInterrupt):
                call.sweep()
            assert unchanged(model)
            with pytest.raises(oomb.Error, match="call.sweep: expected one without an error"):
                call.sweep()
        assert engine.state_dict()["step"] == 0
        two_passes(engine, dpo)  # the next one works


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, "temperature: expected a number > 0, got 0"),
        ({"temperature": float("nan")}, "temperature: expected a number > 0, got nan"),
        ({"logprobs": False}, "logprobs: expected True where neither"),
        ({"statistics": ["mode"]}, "statistics: expected some of mean_logits, is_top1"),
        ({"entropies": "yes"}, "entropies: expected True or False, got 'yes'"),
        ({"labels": torch.full_like(IDS, -100)}, "labels: expected at least one token to predict"),
        ({"attention_mask": MASK.flip(1)}, "attention_mask: expected right padding only"),
        ({"input_ids": [[1, 2]], "labels": None}, "input_ids: expected"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with (
        oomb.Engine(make("llama"), CONFIG) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.two_pass(**{"input_ids": IDS, "labels": LABELS, **arguments})
