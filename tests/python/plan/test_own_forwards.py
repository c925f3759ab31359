"""Models on whose modules somebody has put a forward: the trace runs copies, and only copies."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import trl
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from engine.models import ROPES, make
from oomb.engine import calls, needs
from oomb.errors import UnsupportedModelError
from oomb.hf import SFTTrainer
from oomb.model.causal import CausalModel
from oomb.trace.setting import Setting
from oomb.trace.trace import Trace, Tracer
from trainer.runs import logged, model, prompts, sft_arguments, tokenizer

SETTING = Setting(128, 1, "none", False)


def closure(model: Any) -> None:
    inner = model.forward
    model.forward = lambda *args, **keywords: inner(*args, **keywords)


def closure_of_a_layer(model: Any) -> None:
    closure(model.model.layers[1].mlp)


def bound_closure(model: Any) -> None:
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        return inner(*args, **keywords)

    model.forward = MethodType(forward, model)


def partial_of_the_class(model: Any) -> None:
    model.forward = functools.partial(type(model).forward, model)


def partial_of_a_closure(model: Any) -> None:
    def forward(given: list[Any], *args: Any, **keywords: Any) -> Any:
        return given[0](*args, **keywords)

    model.forward = functools.partial(forward, [model.forward])


def default_argument(model: Any) -> None:
    def forward(*args: Any, inner: Any = model.forward, **keywords: Any) -> Any:
        return inner(*args, **keywords)

    model.forward = forward


class Caller:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.inner(*args, **keywords)


def callable_object(model: Any) -> None:
    model.forward = Caller(lambda *args, inner=model.forward, **keywords: inner(*args, **keywords))


def weak_reference(model: Any) -> None:
    held, kind = weakref.ref(model), type(model)
    model.forward = lambda *args, **keywords: kind.forward(held(), *args, **keywords)


def forward_that_finds_itself(model: Any) -> None:
    inner = model.forward

    def forward(*args: Any, again: bool = True, **keywords: Any) -> Any:
        return forward(*args, again=False, **keywords) if again else inner(*args, **keywords)

    model.forward = forward


WRAPPERS: list[Callable[[Any], None]] = [
    add_fused_lm_head,
    closure,
    closure_of_a_layer,
    bound_closure,
    partial_of_the_class,
    partial_of_a_closure,
    default_argument,
    callable_object,
    weak_reference,
    forward_that_finds_itself,
]


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
        assert torch.equal(parameter, before[name]), name


@functools.cache
def stock_trace(layers: int) -> Trace:
    model = make("llama", torch.float32, num_hidden_layers=layers)
    return Tracer(model, "cpu", False).trace(SETTING)


@pytest.mark.parametrize(
    ("wrap", "layers"),
    [(wrap, 2) for wrap in WRAPPERS]
    + [(wrap, 8) for wrap in (add_fused_lm_head, closure_of_a_layer)],  # copies of the copy are run
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_trace_is_that_of_the_model_without(wrap: Callable[[Any], None], layers: int) -> None:
    model = make("llama", torch.float32, num_hidden_layers=layers)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = stock_trace(layers)
    wrap(model)
    found = Tracer(model, "cpu", False).trace(SETTING)
    assert_untouched(model, before)
    assert found.sum_bytes == expected.sum_bytes
    assert found.fill_peak_bytes == expected.fill_peak_bytes
    assert found.sweep_peak_bytes == pytest.approx(expected.sweep_peak_bytes, rel=0.01)
    assert found.sweep.flops == pytest.approx(expected.sweep.flops, rel=0.01)


FOUND_BY_NAME: list[Any] = []


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_that_is_found_by_name_is_not_traced(trained: bool) -> None:
    """No copy can be led to it; then a step is planned by rule of thumb, and runs."""
    model = make("llama", torch.float32).requires_grad_(trained)
    model.model.embed_tokens.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    FOUND_BY_NAME[:] = [model.model.layers[0].mlp.forward]
    model.model.layers[0].mlp.forward = lambda x: FOUND_BY_NAME[0](x)
    with pytest.raises(UnsupportedModelError, match="cannot be planned without running it"):
        Tracer(model, "cpu", False).trace(SETTING)
    assert_untouched(model, before)


def test_frequencies_that_depend_on_positions_are_not_traced() -> None:
    name, settings = ROPES["dynamic"]
    with pytest.raises(UnsupportedModelError, match="cannot be planned without running it"):
        Tracer(make(name, **settings), "cpu", False)


def test_what_a_forward_writes_down_is_not_written_by_the_trace() -> None:
    seen: list[int] = []
    model = make("granite", torch.float32)  # whose head is no product, so that nothing tries it
    inner = model.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        seen.append(len(args))
        return inner(*args, **keywords)

    model.forward = forward
    Tracer(model, "cpu", False).trace(SETTING)
    assert not seen


# The head ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_the_head_is_still_a_product(wrap: Callable[[Any], None], dtype: torch.dtype) -> None:
    model = make("qwen2", dtype)
    wrap(model)
    state = torch.get_rng_state()
    head = CausalModel(model).head
    assert head.plain_weight() is model.lm_head.weight
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model.model)


def changing(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def wrap(model: Any) -> None:
        inner = model.forward

        def forward(*args: Any, **keywords: Any) -> Any:
            output = inner(*args, **keywords)
            output.logits = change(output.logits)
            return output

        model.forward = forward

    return wrap


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 1.01,
        lambda logits: 30 * torch.tanh(logits / 30),
        lambda logits: logits.clamp(-5, 5),
        lambda logits: logits + 1,
        lambda logits: logits.index_fill(-1, torch.tensor([3]), float("-inf")),
    ],
    ids=["scaled", "capped", "clamped", "biased", "masked"],
)
def test_a_forward_that_changes_logits_is_no_product(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = make("llama", torch.float32)
    changing(change)(model)
    assert CausalModel(model).head.plain_weight() is None
    model.__dict__.pop("forward")
    assert CausalModel(model).head.plain_weight() is model.lm_head.weight


def test_a_head_whose_forward_is_replaced_later_is_tried_again() -> None:
    model = make("llama", torch.float32)
    head = CausalModel(model).head
    closure(model)
    assert head.plain_weight() is not None
    changing(lambda logits: logits + 1)(model)
    assert head.plain_weight() is None


# Three steps ------------------------------------------------------------------------------------


def test_sft_trainer_where_memory_is_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 32 MiB a chunk's activations are no trifle, so that they are counted."""
    traced: list[Setting] = []
    trace = Tracer.trace

    def noted(self: Tracer, setting: Setting) -> Any:
        traced.append(setting)
        return trace(self, setting)

    def run(kind: Any, **own: Any) -> list[float]:
        trainer = kind(
            model(),
            args=sft_arguments(tmp_path / kind.__module__, max_length=96, max_steps=3),
            train_dataset=prompts(),
            processing_class=tokenizer(),
            **own,
        )
        trainer.train()
        return logged(trainer, "loss")

    stock = run(trl.SFTTrainer)
    monkeypatch.setattr(Tracer, "trace", noted)
    for module in (needs, calls):
        monkeypatch.setattr(module, "free_memory", lambda _: 2**25)
    ours = run(SFTTrainer)
    assert traced
    assert ours == pytest.approx(stock, rel=1e-5)
