"""Losses of per-token values in two passes, against one ordinary backward in fp64."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import peft
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

import oomb
from oomb.core import loss as loss_module
from oomb.core.loss import ChunkLoss
from oomb.core.token_values import STATISTICS
from oomb.engine.two_pass import TwoPass

from .models import make
from .recurrent_models import make_recurrent, nothing_rounds_to_float32
from .reference import EXACT, Gradients, relative_error, take_gradients
from .tiers import slot_bytes
from .two_pass_losses import (
    CONFIG,
    COUNTED,
    IDS,
    LABELS,
    LOSSES,
    MASK,
    TOKENS,
    Values,
    assert_close,
    dpo,
    grpo,
    kto,
    of_sequences,
    ordinary,
    ordinary_values,
    rloo,
    two_passes,
    values_of,
)


@pytest.mark.parametrize("name", LOSSES)
def test_equals_one_backward(name: str) -> None:
    loss, names = LOSSES[name]
    model = make("qwen3")
    expected = ordinary(model, loss)
    with oomb.Engine(model, CONFIG) as engine:
        two_passes(engine, loss, names)
    assert_close(take_gradients(model), expected)


def test_values_are_those_of_the_model() -> None:
    model = make("qwen3")
    with torch.no_grad():
        expected = ordinary_values(model, 0.7)
    with oomb.Engine(model, CONFIG) as engine:
        arguments = {"attention_mask": MASK, "temperature": 0.7, "entropies": True, "hidden": True}
        arguments["statistics"] = STATISTICS
        with engine.two_pass(IDS, LABELS, **arguments) as call:
            found = values_of(call)
            statistics = call.statistics
        with torch.no_grad(), engine.two_pass(IDS, LABELS, **arguments) as call:
            constants = values_of(call)
            with pytest.raises(oomb.Error, match="call.sweep: expected one begun with gradients"):
                call.sweep()
        step = engine.evaluate(IDS, LABELS, attention_mask=MASK, return_logprobs=True)
        with engine.two_pass(IDS, attention_mask=MASK) as call:  # every token has a value
            assert call.num_valid_tokens == int(MASK[:, 1:].sum())
            assert torch.equal(call.logprobs[COUNTED].detach(), step.logprobs[COUNTED])  # type: ignore[index]
    assert all(not value.requires_grad for value in statistics.values())
    for name, value in statistics.items():
        assert relative_error(value.double(), expected[name].double()) <= EXACT
    real = MASK == 1
    for name, value in found.items():
        assert value.requires_grad and value.is_leaf and not constants[name].requires_grad
        assert torch.equal(constants[name], value)
        rows = real if name == "hidden" else torch.ones_like(real)
        assert relative_error(value[rows].detach(), expected[name][rows]) <= EXACT


def test_a_classifier_has_hidden_states_alone() -> None:
    model = AutoModelForSequenceClassification.from_config(make("llama").config)
    with oomb.Engine(model, CONFIG) as engine:
        for call in (
            lambda: engine.forward_backward(IDS, LABELS),
            lambda: engine.evaluate(IDS, LABELS),
            lambda: engine.two_pass(IDS, hidden=True),
        ):
            text = "with a language-model head, got LlamaForSequenceClassification: train its head"
            with pytest.raises(ValueError, match=text):
                call()
        with engine.two_pass(IDS, attention_mask=MASK, logprobs=False, hidden=True) as two:
            two.of_sequences().sum().backward()
            two.sweep()
    assert model.score.weight.grad is not None
    assert all(p.grad is not None for p in model.model.parameters())
    text = "call.of_sequences: expected a sequence classifier"
    with (
        oomb.Engine(make("llama"), CONFIG) as engine,
        engine.two_pass(IDS, hidden=True) as two,
        pytest.raises(oomb.Error, match=text),
    ):
        two.of_sequences()


CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "recompute": {"recompute": "layer"},
    "kept outputs": {"keep_outputs": "all"},
    "two tiers": {"slots": 24},
    "two tiers, kept": {"slots": 24, "keep_outputs": 0.5},
    "one chunk": {"chunk_size": 80},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model_name", ["gpt-oss", "granite"])
def test_settings(case: str, model_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks and windows, scaled logits; slices that are no divisor of a chunk's rows."""
    monkeypatch.setattr(loss_module, "slice_rows", lambda *_: 13)
    settings = {"chunk_size": 16, "page_size": 8, "keep_outputs": "none", **CASES[case]}
    temperature, slots = settings.pop("temperature", 1.0), settings.pop("slots", None)
    model = make(model_name)
    config = oomb.Config(**settings)
    if slots is not None:
        settings["device_memory"] = slots * slot_bytes(model, config)
        config = oomb.Config(**settings, host_memory="16MiB")
    expected = ordinary(model, grpo, temperature)
    with oomb.Engine(model, config) as engine:
        stats = two_passes(engine, grpo, LOSSES["grpo"][1], temperature=temperature)
    assert (stats.host_peak_bytes > 0) == (slots is not None)
    assert (stats.kept_output_share > 0) == (settings["keep_outputs"] != "none")
    assert_close(take_gradients(model), expected)


def test_packed_documents() -> None:
    model = make("llama")
    ids = IDS[:1]
    positions = torch.cat([torch.arange(30), torch.arange(45)])[None]
    labels = ids.clone()
    labels[0, 30] = -100  # the first token of a document

    def loss(a: Values) -> torch.Tensor:
        first, second = a["logprobs"][:, :30].sum(), a["logprobs"][:, 30:].sum()
        return -F.logsigmoid(0.1 * (first - second)) - a["entropies"].square().mean()

    arguments = {"input_ids": ids, "attention_mask": None, "position_ids": positions}
    expected = ordinary(model, loss, labels=labels, **arguments)
    with oomb.Engine(model, CONFIG) as engine:
        two_passes(engine, loss, LOSSES["grpo"][1], labels=labels, **arguments)
    assert_close(take_gradients(model), expected)


def test_accumulates_and_scales_as_backward_does() -> None:
    """Two calls, several backwards in one, a gradient scaler's factor, and gradients before."""
    model = make("qwen2-tied")
    expected = ordinary(model, lambda a: 1024 * (dpo(a) + kto(a)) + 1024 * rloo(a))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    with oomb.Engine(model, CONFIG) as engine:
        with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
            (1024 * dpo(values_of(call))).backward()
            (1024 * kto(values_of(call))).backward()
            assert all(bool((p.grad == 7).all()) for p in model.parameters())  # type: ignore[union-attr]
            call.sweep()
        two_passes(engine, lambda a: 1024 * rloo(a))
        assert engine.state_dict()["step"] == 2
    found = {name: grad - 7 for name, grad in take_gradients(model).items()}
    assert_close(found, expected, 1e-11)  # the 7 costs digits


def lora() -> Any:
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(make("qwen3"), settings)


def test_adapters_with_the_reference_between_the_passes() -> None:
    """The call is filled again then, which is said once."""
    model = lora()
    with torch.no_grad(), model.disable_adapter():
        reference = of_sequences(ordinary_values(model, 1.0)["logprobs"])

    def loss(a: Values, of_reference: torch.Tensor) -> torch.Tensor:
        chosen, rejected = (of_sequences(a["logprobs"]) - of_reference).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    expected = ordinary(model, lambda a: loss(a, reference))
    TwoPass._said = False
    arguments = {"attention_mask": MASK}
    with oomb.Engine(model, CONFIG) as engine:
        for between in (False, True, True):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with engine.two_pass(IDS, LABELS, **arguments) as call:
                    if between:
                        with model.disable_adapter(), torch.no_grad():
                            step = engine.evaluate(IDS, LABELS, **arguments, return_logprobs=True)
                        assert step.logprobs is not None
                        of_reference = of_sequences(step.logprobs)
                        assert relative_error(of_reference, reference) <= EXACT
                    loss(values_of(call), reference).backward()
                    call.sweep()
            found = take_gradients(model)
            assert all("lora" in name for name in found)
            assert_close(found, expected)
            assert [w for w in said if "fills again" in str(w.message)] == said
            assert len(said) == (1 if between and not TwoPass._said else len(said))


@pytest.mark.parametrize("slots", [None, 24])
def test_pages_are_those_of_the_first_pass(slots: int | None) -> None:
    """A rule that chooses otherwise each time would betray a second choice."""

    class Turning(oomb.PageRule):
        max_pages = 2
        calls = 0

        def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
            Turning.calls += 1
            pages = torch.arange(past.num_tokens // past.page_size).roll(Turning.calls)[:2]
            blocks = -(-q.shape[2] // past.page_size)
            chosen = pages.sort().values.to(torch.int32)
            return chosen.expand(q.shape[0], blocks, 1, 2).contiguous()

    model = make("llama")
    settings: dict[str, Any] = {"chunk_size": 16, "page_size": 8, "attention": Turning()}
    if slots is not None:
        page = slot_bytes(model, oomb.Config(**settings))
        settings |= {"device_memory": slots * page, "host_memory": "16MiB"}
    results = []
    with oomb.Engine(model, oomb.Config(**settings)) as engine:
        for between in (False, True):
            Turning.calls = 0
            with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
                dpo(values_of(call)).backward()
                calls = Turning.calls
                if between:
                    engine.evaluate(IDS[:, :40], LABELS[:, :40])
                    calls = Turning.calls
                call.sweep()
                assert Turning.calls == calls > 0
            results.append(take_gradients(model))
    assert all(torch.equal(results[0][name], grad) for name, grad in results[1].items())


class Kept(oomb.SampledChunks):
    """Sweeps given chunks."""

    chunks: tuple[int, ...] = (1, 3)

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return list(self.chunks)


@pytest.mark.parametrize("between", [False, True])
def test_truncated_chunks(between: bool) -> None:
    model = make("qwen3")
    config = oomb.Config(chunk_size=16, page_size=8, backward=oomb.TruncatedChunks(window=1))
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(IDS, LABELS, attention_mask=MASK, num_items_in_batch=1)
        expected = take_gradients(model)
        with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
            (-call.logprobs.sum()).backward()
            if between:
                engine.evaluate(IDS, LABELS, attention_mask=MASK)
            call.sweep()
    assert_close(take_gradients(model), expected)


def test_values_go_with_the_call() -> None:
    """The engine keeps nothing of a call that is over: hidden states take much host memory."""
    with oomb.Engine(make("qwen3"), CONFIG) as engine:
        with engine.two_pass(IDS, LABELS, attention_mask=MASK, hidden=True) as call:
            call.logprobs.sum().backward()
            call.sweep()
        hidden = weakref.ref(call.hidden)
        del call
        gc.collect()
        assert hidden() is None


def test_sampled_chunks() -> None:
    """The estimate over all draws of two chunks is the gradient; the values are exact in each."""
    model = make("llama")
    ids = IDS[:2, :30]

    def loss(a: Values) -> torch.Tensor:
        first, second = a["logprobs"].sum(1)
        return -F.logsigmoid(0.1 * (first - second))

    whole = {"input_ids": ids, "labels": ids, "attention_mask": None}
    expected = ordinary(model, loss, **whole)
    total: Gradients = {name: torch.zeros_like(g) for name, g in expected.items()}
    for chunks in [(), (0,), (1,), (0, 1)]:
        rule = Kept(keep=0.25)
        object.__setattr__(rule, "chunks", chunks)
        probability = 0.25 ** len(chunks) * 0.75 ** (2 - len(chunks))
        with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8, backward=rule)) as engine:
            two_passes(engine, loss, **whole)
        for name, grad in take_gradients(model).items():
            total[name] += probability * grad
    assert_close(total, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fused_way(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's kernel is given and gives back; here in torch, in fp32."""

    def gradient(
        self: ChunkLoss, logits: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> torch.Tensor:
        terms = F.cross_entropy(logits, targets, reduction="none")
        probabilities = logits.softmax(-1)
        probabilities[torch.arange(len(targets)), targets] -= 1
        logits.copy_(scale * probabilities)
        fused.append(len(targets))
        return terms

    monkeypatch.setattr(loss_module, "slice_rows", lambda *_: 13)
    model = make(name, torch.float32)
    with oomb.Engine(model, CONFIG) as engine:
        fused: list[int] = []
        two_passes(engine, dpo, temperature=temperature)
        expected = take_gradients(model)
        assert not fused
        monkeypatch.setattr(ChunkLoss, "_has_kernel", lambda _: True)
        monkeypatch.setattr(ChunkLoss, "_softmax_gradient", gradient)
        two_passes(engine, dpo, temperature=temperature)
        assert sum(fused) == int(COUNTED.sum())
    assert_close(take_gradients(model), expected, 2e-6)


def test_dropout_is_that_of_the_first_pass() -> None:
    """As a call of forward_backward with the same seed."""
    model = make("gpt-oss", attention_dropout=0.0).train()
    for layer in model.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda x, plain=plain: (F.dropout(plain(x)[0], 0.3), plain(x)[1])
    with oomb.Engine(model, CONFIG) as engine:
        torch.manual_seed(3)
        engine.forward_backward(IDS, LABELS, attention_mask=MASK)
        expected = take_gradients(model)
        number = int(COUNTED.sum())
        torch.manual_seed(3)
        with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
            (-call.logprobs.sum() / number).backward()
            after = torch.rand(3)
            call.sweep()
        torch.manual_seed(3)
        torch.randint(2**62, ())
        assert torch.equal(torch.rand(3), after)
    assert_close(take_gradients(model), expected)


@pytest.mark.parametrize("between", [False, True])
def test_recurrent_layers(between: bool) -> None:
    """States at borders are of the first pass, or of the fill that the sweep repeats."""
    model = make_recurrent("qwen3.5")
    arguments: dict[str, Any] = {"attention_mask": None, "labels": None}
    ids = IDS[:, :TOKENS]

    def loss(a: Values) -> torch.Tensor:
        return (a["logprobs"][:, 1:].sum(1) * 0.01).exp().mean() - a["entropies"].square().mean()

    with nothing_rounds_to_float32(), oomb.Engine(model, CONFIG) as engine:
        expected = ordinary(model, loss, labels=ids, attention_mask=None)
        with engine.two_pass(ids, **arguments, entropies=True) as call:
            loss(values_of(call)).backward()
            if between:
                engine.evaluate(ids[:, :20], ids[:, :20])
            call.sweep()
    assert_close(take_gradients(model), expected)
