"""What a chunk needs is counted for the model as it is now, and only where that has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from oomb.engine import needs, tracers
from oomb.engine.needs import activations_of
from oomb.engine.tracers import tracer_of
from oomb.model.causal import CausalModel
from oomb.trace.setting import Setting

from .models import make

CONFIG = oomb.Config(chunk_size=16, page_size=8, recompute="none")
IDS = torch.randint(1, 97, (1, 65), generator=torch.Generator().manual_seed(0))


def count(model: nn.Module) -> int:
    return activations_of(tracer_of(CausalModel(model)).trace(Setting(16, 1, "none", True)))


def with_adapters(model: nn.Module) -> Any:
    settings = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(model, settings).train()  # type: ignore[arg-type]


def frozen(model: Any) -> None:
    model.model.layers.requires_grad_(False)


def larger_vocabulary(model: Any) -> None:
    model.resize_token_embeddings(4096, mean_resizing=False)


def half_as_wide(model: Any) -> None:
    model.to(torch.bfloat16)


def own_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = lambda x: x * 2.0


def another_module(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Identity()


def other_setting_of_a_module(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train(False)


def adapters_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def chosen_adapter(model: Any) -> None:
    model.add_adapter("wide", LoraConfig(r=24, target_modules="all-linear"))
    model.set_adapter("wide")


CHANGES: dict[str, tuple[bool, Callable[[Any], object]]] = {
    "frozen layers": (False, frozen),
    "tokens added": (False, larger_vocabulary),
    "another dtype": (False, half_as_wide),
    "a forward put on modules": (False, own_forward),
    "another module": (False, another_module),
    "adapters put on": (False, with_adapters),
    "evaluation": (True, lambda model: model.eval()),
    "a flag of some modules": (True, other_setting_of_a_module),
    "adapters off": (True, adapters_off),
    "another adapter": (True, chosen_adapter),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_has_changed_is_counted_anew(name: str) -> None:
    adapted, change = CHANGES[name]
    model: Any = make("llama", torch.float32)
    model = with_adapters(model) if adapted else model
    before = count(model)
    change(model)
    after = count(model)
    tracers._kept.clear()
    assert after == count(model)
    assert after != before


def test_a_setting_in_the_config_is_counted() -> None:
    """Read in the forward of some models."""
    model: Any = make("gemma2", torch.float32)
    before = tracer_of(CausalModel(model))
    model.config.final_logit_softcapping = None
    assert tracer_of(CausalModel(model)) is not before


def test_autocast_is_counted() -> None:
    model = make("llama", torch.float32)
    inside: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16)
    counts = []
    for around in (nullcontext(), inside, nullcontext()):
        with around:
            counts.append(count(model))
    tracers._kept.clear()
    with inside:
        assert counts[1] == count(model) != counts[0]
    assert counts[2] == counts[0]


def test_modes_that_take_turns_are_traced_once() -> None:
    model = CausalModel(with_adapters(make("llama", torch.float32)))
    training = tracer_of(model)
    evaluating = tracer_of(CausalModel(model.causal.eval()))
    assert training is not evaluating
    assert tracer_of(CausalModel(model.causal.train())) is training
    assert tracer_of(CausalModel(model.causal.eval())) is evaluating


def test_few_states_are_kept() -> None:
    model: Any = make("llama", torch.float32)
    first = tracer_of(CausalModel(model))
    for parameter in list(model.parameters())[:6]:
        parameter.requires_grad_(False)
        tracer_of(CausalModel(model))
    assert len(tracers._kept[model]) == 4
    model.requires_grad_(True)
    assert tracer_of(CausalModel(model)) is not first


def with_a_forward_that_holds_it(model: Any) -> Any:
    mlp = model.model.layers[0].mlp
    usual = mlp.forward

    def forward(x: torch.Tensor) -> Any:
        return usual(x) if model.config is not None else x

    mlp.forward = forward
    return model


def test_no_model_is_kept_alive() -> None:
    """Nor by forwards of its modules that hold it."""
    model = with_a_forward_that_holds_it(make("llama", torch.float32))
    tracer_of(CausalModel(model))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Counted:
    """Models that tracers are made of, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[nn.Module] = []
        models = self.models

        class Counting(tracers.Tracer):
            def __init__(self, model: nn.Module, *others: Any) -> None:
                models.append(model)
                super().__init__(model, *others)

        monkeypatch.setattr(tracers, "Tracer", Counting)


FEW = {"device_memory": "8MiB", "host_memory": "64MiB"}


@pytest.mark.parametrize(
    ("settings", "tokens", "times"),
    [
        (FEW, 40, 0),
        ({"recompute": "layer"}, 40, 0),  # of so short a text no output is worth a copy
        ({"recompute": "layer", **FEW}, 40, 0),
        ({"recompute": "layer"}, 65, 1),
        ({"recompute": "layer", "keep_outputs": "none"}, 65, 0),
        ({"recompute": "layer", "keep_outputs": "all"}, 40, 1),
        ({"device_memory": "100TiB"}, 40, 1),
    ],
)
def test_what_decides_nothing_is_not_counted(
    settings: dict[str, Any], tokens: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    config = oomb.Config(**{"chunk_size": 8, "page_size": 8, **settings})
    ids = IDS[:, :tokens]
    with oomb.Engine(make("llama", torch.float32), config) as engine:
        engine.forward_backward(ids, ids)
    assert len(counted.models) == times


@pytest.mark.parametrize("settings", [{}, {"weights": "host"}, {"main_grad_device": "host"}])
def test_calls_find_the_model_as_it_was(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine itself does to it around them."""
    counted = Counted(monkeypatch)
    monkeypatch.setattr(needs, "_TRIFLE", 0.0)  # else nothing of it is counted
    config = oomb.Config(chunk_size=16, page_size=8, **settings)
    with oomb.Engine(with_adapters(make("llama", torch.float32)), config) as engine:
        for _ in range(3):
            engine.forward_backward(IDS, IDS)
            engine.evaluate(IDS, IDS)
    assert len(counted.models) == 1
