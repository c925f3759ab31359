"""An interrupt at any line: the model is as before, and the next call has the usual bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb

from .interruptions import Interrupt, Lines, Place, differences, every_line, state_of
from .models import make
from .reference import random_ids, take_gradients
from .tiers import slot_bytes

IDS = random_ids(1, 24)  # 3 chunks
EVERY, OFTEN = 19, 3  # n-th line, in the fast suite and in the others

SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "sparse": {"attention": oomb.TopKPages(budget=2), "recompute": "layer"},
    "weights": {"weights": "host", "attention": oomb.TopKPages(budget=2)},
}
Work = Callable[[oomb.Engine], object]


def config(model: PreTrainedModel, **settings: Any) -> oomb.Config:
    """A tier of 4 pages, so that pages travel and, with lists, chunks take turns."""
    sizes = {"chunk_size": 8, "page_size": 8}
    page = slot_bytes(model, oomb.Config(**sizes))
    return oomb.Config(**sizes, device_memory=4 * page, host_memory="1MiB", **settings)


def small() -> PreTrainedModel:
    return make("llama", num_hidden_layers=2, attention_dropout=0.0)


def train(engine: oomb.Engine) -> oomb.Step:
    return engine.forward_backward(IDS, IDS)


def evaluate(engine: oomb.Engine) -> oomb.Step:
    return engine.evaluate(IDS, IDS)


def set_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 7)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def two_pass(engine: oomb.Engine) -> oomb.Stats:
    """Filled twice: another call comes between its passes."""
    with engine.two_pass(IDS, entropies=True) as call:
        (call.logprobs.sum() * call.entropies.mean()).backward()
        engine.evaluate(IDS, IDS)
        return call.sweep()


class Usual:
    """An engine, what its calls give, and the same again after each interrupt."""

    def __init__(self, work: Work, settings: dict[str, Any]) -> None:
        self.model = small().train()
        if settings.get("weights") == "host":
            for parameter in self.model.model.layers.parameters():
                parameter.requires_grad_(parameter.ndim == 1)
        self.engine = oomb.Engine(self.model, config(self.model, **settings))
        self.loss = train(self.engine).loss
        self.gradients = take_gradients(self.model)
        work(self.engine)
        self.of_work = take_gradients(self.model)
        self.work = work

    def call(self) -> None:
        self.work(self.engine)

    def interrupt(self, place: Place, visit: int) -> list[str]:
        """What is wrong after an interrupt there; also the next call."""
        gradients = set_gradients(self.model)
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        before, steps = state_of(self.model), self.engine.state_dict()["step"]
        lines = Lines(place, visit)
        try:
            lines.run(self.call)
        except Interrupt:
            pass
        else:
            return ["no interrupt came out"] if lines.raised else []
        found = differences(before, state_of(self.model))
        counted = self.engine.state_dict()["step"] - steps
        for name, grad in gradients.items():
            expected = 7 + counted * self.of_work[name] if counted else torch.full_like(grad, 7)
            if not torch.equal(grad, expected):
                found.append(f"the gradient of {name}, of {counted} calls")
        for name, parameter in self.model.named_parameters():
            if not torch.equal(parameter, weights[name]):
                found.append(f"the weight {name}")
        return found + self.next_call()

    def next_call(self) -> list[str]:
        self.model.zero_grad()
        try:
            loss = train(self.engine).loss
        except Exception as error:
            return [f"the next call: {type(error).__name__}: {error}"]
        gradients = take_gradients(self.model)
        same = torch.equal(loss, self.loss)
        same = same and all(torch.equal(gradients[k], g) for k, g in self.gradients.items())
        return [] if same else ["the next call has other bits"]


def report(wrong: dict[str, list[str]]) -> str:
    return "\n".join(f"{place}: {'; '.join(found)[:300]}" for place, found in wrong.items())


def judge(times: list[tuple[Place, int]], wrong: dict[str, list[str]]) -> None:
    """``pytest -s`` shows how many places a sweep tried."""
    said = f"{len(wrong)} of {len(times)} places left something behind"
    print(said)
    assert not wrong, f"{said}:\n{report(wrong)}"


def chosen(places: dict[Place, int], every: int, last: bool) -> list[tuple[Place, int]]:
    """Every n-th place, the first or the last time that it is come by."""
    times = [(place, most if last else 1) for place, most in places.items()]
    assert len(times) > 500, "the whole call is traced"
    return times[every // 3 :: every]


def sweep(work: Work, settings: dict[str, Any], every: int, last: bool) -> None:
    usual = Usual(work, settings)
    times = chosen(every_line(usual.call), every, last)
    wrong = {}
    for place, visit in times:
        if found := usual.interrupt(place, visit):
            wrong[f"{place[0]}:{place[1]} (time {visit})"] = found
    judge(times, wrong)


def sweep_of_construction(every: int) -> None:
    model = small().train()
    before = state_of(model)

    def construct() -> None:
        oomb.Engine(model, config(model))

    with oomb.Engine(model, config(model)) as engine:
        loss = engine.evaluate(IDS, IDS).loss
    times = chosen(every_line(construct), every, last=False)
    wrong = {}
    for place, visit in times:
        with pytest.raises(Interrupt):
            Lines(place, visit).run(construct)
        found = differences(before, state_of(model))
        with oomb.Engine(model, config(model)) as engine:
            if not torch.equal(engine.evaluate(IDS, IDS).loss, loss):
                found.append("the next engine has another loss")
        if found:
            wrong[f"{place[0]}:{place[1]}"] = found
    judge(times, wrong)


CASES = pytest.mark.parametrize(
    ("work", "settings", "last"),
    [
        pytest.param(train, SETTINGS["exact"], True, id="train, exact"),
        pytest.param(train, SETTINGS["sparse"], False, id="train, sparse"),
        pytest.param(train, SETTINGS["weights"], True, id="train, weights on the host"),
        pytest.param(evaluate, SETTINGS["exact"], True, id="evaluate"),
        pytest.param(two_pass, SETTINGS["sparse"], False, id="two passes, sparse"),
    ],
)


@CASES
@pytest.mark.sampled(2)
def test_at_some_lines_of_a_call(work: Work, settings: dict[str, Any], last: bool) -> None:
    sweep(work, settings, EVERY, last)


@pytest.mark.slow
@pytest.mark.release
@CASES
def test_at_many_lines_of_a_call(work: Work, settings: dict[str, Any], last: bool) -> None:
    sweep(work, settings, OFTEN, last)


def test_at_some_lines_of_construction() -> None:
    sweep_of_construction(EVERY)


@pytest.mark.slow
def test_at_many_lines_of_construction() -> None:
    sweep_of_construction(OFTEN)
