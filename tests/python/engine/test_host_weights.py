"""Layer weights on the host: the same bits as on the device, whenever their copies are made."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from oomb.errors import Error, UnsupportedModelError
from oomb.model.host_weights import PLACES, Copies, HostWeights, place_of

from .models import make
from .recurrent_models import make_recurrent
from .reference import Result, random_ids, take_gradients
from .tiers import slot_bytes

IDS = random_ids(2, 75)


class CopiesInTheEnd(Copies):
    """Done when they must be: before them a place has nonsense."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def load(self, place: int, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(0xFF)  # NaN, read as any float
        self._begun[place] = target, source

    def wait(self, place: int) -> None:
        if place in self._begun:
            target, source = self._begun.pop(place)
            target.copy_(source)

    def finish(self) -> None:
        self._begun.clear()


class CopiesWithNonsense(Copies):
    """Done at once; what else the place had is nonsense."""

    def load(self, place: int, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(0xFF)
        target.copy_(source)


COPIES: dict[str, Callable[[], Copies]] = {"early": CopiesWithNonsense, "late": CopiesInTheEnd}


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(**{"chunk_size": 16, "page_size": 8, **settings})


def partly_frozen(name: str, **sizes: Any) -> Any:
    """Vectors of the layers are trained, and what is outside of layers."""
    model = make(name, **sizes)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim == 1 or "layers." not in parameter_name)
    return model


def run(
    model: nn.Module,
    settings: oomb.Config,
    copies: Copies | None = None,
    calls: int = 1,
    **arguments: Any,
) -> Result:
    with oomb.Engine(model, settings) as engine:
        if copies is not None:
            weights = engine._model.host_weights
            assert weights is not None
            weights.copies = copies
        for _ in range(calls):
            model.zero_grad()
            step = engine.forward_backward(IDS, IDS, **arguments)
    return Result(step.loss, take_gradients(model), step)


def assert_same_bits(ours: Result, expected: Result) -> None:
    assert torch.equal(ours.loss, expected.loss)
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name


@pytest.mark.parametrize("name", ["llama-tied", "phi3", "gpt-oss", "cohere-norm"])
@pytest.mark.sampled(2)
def test_architectures(name: str) -> None:
    expected = run(partly_frozen(name), config(recompute="none"))
    for recompute in ("none", "layer"):
        settings = config(recompute=recompute, weights="host")
        assert_same_bits(run(partly_frozen(name), settings, CopiesInTheEnd()), expected)


@pytest.mark.parametrize("name", ["qwen3.5-moe", "nemotron-h"])
def test_recurrent_layers(name: str) -> None:
    def frozen() -> Any:
        model = make_recurrent(name)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.ndim == 1 or "layers." not in parameter_name)
        return model

    expected = run(frozen(), config())
    assert_same_bits(run(frozen(), config(weights="host"), CopiesInTheEnd()), expected)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("layers", [2, 4, 5])
@pytest.mark.parametrize("attention", [oomb.Dense(), oomb.TopKPages(budget=2)])
@pytest.mark.sampled(5)
def test_pages_that_travel(attention: Any, layers: int, copies: str) -> None:
    """With lists, two chunks take turns in the fill, each in a layer of its own."""

    def settings(model: Any, **others: Any) -> oomb.Config:
        page = slot_bytes(model, config())
        return config(attention=attention, device_memory=14 * page, host_memory="4MiB", **others)

    model = partly_frozen("llama", num_hidden_layers=layers)
    expected = run(model, settings(model))
    assert expected.step is not None and (layers < 3 or expected.step.stats.h2d_bytes > 0)
    model = partly_frozen("llama", num_hidden_layers=layers)
    assert_same_bits(run(model, settings(model, weights="host"), COPIES[copies](), 2), expected)


@pytest.mark.parametrize("copies", COPIES)
def test_adapters(copies: str) -> None:
    def adapted() -> Any:
        model = get_peft_model(
            make("llama", num_hidden_layers=4),
            LoraConfig(r=4, target_modules="all-linear", use_dora=True),
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
        return model

    torch.manual_seed(1)
    expected = run(adapted(), config())
    torch.manual_seed(1)
    model = adapted()
    assert_same_bits(run(model, config(weights="host"), COPIES[copies](), 2), expected)


def test_neighbours_have_places_of_their_own() -> None:
    for layers in range(1, 100):
        places = [place_of(layer, layers) for layer in range(layers)]
        assert set(places) <= set(range(PLACES))
        assert all(a != b for a, b in pairwise(places))
        if layers > 2:
            assert len({places[-2], places[-1], places[0]}) == 3


def test_evaluate_and_two_passes() -> None:
    results = []
    for weights in ("device", "host"):
        model = partly_frozen("llama")
        with oomb.Engine(model, config(weights=weights)) as engine:
            evaluated = engine.evaluate(IDS, IDS).loss
            with engine.two_pass(IDS) as call:
                call.logprobs.square().sum().backward()
                engine.evaluate(IDS, IDS)
                call.sweep()
        results.append(Result(evaluated, take_gradients(model)))
    assert_same_bits(*results)


def test_weights_are_where_and_what_they_were_between_calls() -> None:
    model = partly_frozen("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with oomb.Engine(model, config(weights="host")) as engine:
        places = {name: p.data_ptr() for name, p in model.named_parameters()}
        engine.forward_backward(IDS, IDS)

        def fails(_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(IDS, IDS, on_progress=fails)
        weights = engine._model.host_weights
        assert weights is not None
        assert places == {name: p.data_ptr() for name, p in model.named_parameters()}
    after = {name: p.detach() for name, p in model.named_parameters()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.isfinite(model(IDS).logits).all()  # on a CPU it still runs by itself


def test_what_a_call_fetches() -> None:
    """Of five layers the device holds three, so each pass of a chunk brings two or more."""
    model = partly_frozen("llama", num_hidden_layers=5)
    with oomb.Engine(model, config(weights="host")) as engine:
        calls = [engine.forward_backward(IDS, IDS).stats for _ in range(2)]
        evaluated = engine.evaluate(IDS, IDS).stats
        with engine.two_pass(IDS, IDS) as call:
            call.logprobs.sum().backward()
            in_two = call.sweep()
        weights = engine._model.host_weights
        assert weights is not None
        layer = weights.host_bytes // 5
    for stats in calls:  # 5 chunks, 4 of them filled
        assert 9 * 2 * layer <= stats.fetched_weight_bytes <= (4 + 2 * 5) * 5 * layer
        assert 0 < stats.exposed_weight_seconds < stats.fill_seconds + stats.sweep_seconds
    assert calls[0].fetched_weight_bytes == calls[1].fetched_weight_bytes
    assert 5 * 2 * layer <= evaluated.fetched_weight_bytes <= 6 * 5 * layer
    # Both passes count, and the first runs all five chunks to their end.
    assert in_two.fetched_weight_bytes >= calls[0].fetched_weight_bytes
    with oomb.Engine(make("llama"), config()) as engine:
        assert engine.forward_backward(IDS, IDS).stats.fetched_weight_bytes == 0


def test_changed_between_calls() -> None:
    """What the host has counts, as when adapters are merged into it."""
    model = partly_frozen("llama")
    with oomb.Engine(model, config(weights="host")) as engine:
        first = engine.forward_backward(IDS, IDS).loss
        weight = model.model.layers[1].mlp.up_proj.weight
        with torch.no_grad():
            weight.mul_(2)
        second = engine.forward_backward(IDS, IDS).loss
        assert not torch.equal(first, second)
        weight.data = weight.data.clone()
        with pytest.raises(Error, match="expected its frozen weights in the host memory"):
            engine.forward_backward(IDS, IDS)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: None, "got layers whose weights are all trained; train adapters of peft"),
        (
            lambda model: setattr(model.model.layers[0], "_hf_hook", object()),
            "accelerate moves its weights",
        ),
        (lambda model: model.to("meta"), "expected weights in memory, got none"),
        (
            lambda model: setattr(
                model.model.layers[0].mlp.up_proj, "weight", _Other(torch.zeros(2))
            ),
            "bitsandbytes and weight-only ones of torchao, got _Other; set weights='device'",
        ),
    ],
    ids=["trained", "accelerate", "meta", "subclass"],
)
def test_refused(spoil: Callable[[Any], object], message: str) -> None:
    model = make("llama")
    spoil(model)
    with pytest.raises(UnsupportedModelError, match=message):
        oomb.Engine(model, config(weights="host"))


class _Other(nn.Parameter):
    pass


def test_setting() -> None:
    with pytest.raises(ValueError, match="weights: expected 'device' or 'host', got 'disk'"):
        config(weights="disk")


def test_shared_weights_stay_on_the_device() -> None:
    """A weight of two layers has no place that both could have it in."""
    model = partly_frozen("llama")
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    expected = run(model, config())
    with oomb.Engine(model, config(weights="host")) as engine:
        weights = engine._model.host_weights
        assert isinstance(weights, HostWeights)
        moved = {id(w.parameter) for layer in weights._layers for w in layer.weights}
        assert id(layers[0].mlp.up_proj.weight) not in moved
        step = engine.forward_backward(IDS, IDS)
    assert_same_bits(Result(step.loss, take_gradients(model)), expected)
