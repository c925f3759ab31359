"""An audit's figures against ordinary runs of the model under the dense mask of what was chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import oomb
from engine.dense_mask import Visible, dense_attention
from engine.models import make
from engine.reference import Gradients, chunked, ordinary, random_ids
from oomb.audit import Audit, audit
from oomb.audit.audit import evenly
from oomb.audit.mass import attention_mass
from oomb.audit.outputs import LayerAttention

from .likeness import CHUNK, CLOSE, CONFIG, PAGE, TOKENS, assert_close, likeness


@contextmanager
def outputs_of_layers(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    kept: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept.append((output if isinstance(output, torch.Tensor) else output[0]).detach())

    handles = [layer.register_forward_hook(keep) for layer in model.get_decoder().layers]
    yield kept
    for handle in handles:
        handle.remove()


@dataclass
class Runs:
    """An ordinary exact run, an ordinary run under the mask of the choice, and the audit."""

    audit: Audit
    exact: Gradients
    masked: Gradients
    exact_outputs: list[torch.Tensor]
    masked_outputs: list[torch.Tensor]
    visible: Visible
    scale: float


def runs(
    name: str | PreTrainedModel,
    rule: oomb.PageRule,
    batch: int = 2,
    sample_blocks: int = 99,
    tokens: int = TOKENS,
) -> Runs:
    model = make(name) if isinstance(name, str) else name
    ids = random_ids(batch, tokens)
    found = audit(model, ids, ids, config=CONFIG, attention=[rule], sample_blocks=sample_blocks)
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, attention=rule, record_selection=True)
    step = chunked(model, config, ids, ids).step
    assert step is not None
    whole, visible = (
        Visible(batch, tokens, CHUNK, PAGE, selection) for selection in ([], step.selection)
    )
    with dense_attention(model, whole), outputs_of_layers(model) as exact_outputs:
        exact = ordinary(model, ids, ids)
    with dense_attention(model, visible), outputs_of_layers(model) as masked_outputs:
        masked = ordinary(model, ids, ids)
    scale = next(m.scaling for m in model.get_decoder().modules() if hasattr(m, "scaling"))
    return Runs(
        found, exact.gradients, masked.gradients, exact_outputs, masked_outputs, visible, scale
    )


CASES = [
    ("llama", oomb.TopKPages(budget=3)),
    ("llama", oomb.TopKPages(budget=2, share="kv_head")),
    ("qwen3-tied", oomb.TopKPages(budget=4, score="token_softmax")),
    ("granite", oomb.TopKPages(budget=1)),
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_errors_are_those_of_ordinary_runs(name: str, rule: oomb.TopKPages) -> None:
    found = runs(name, rule)
    (one,) = found.audit.sparse
    everything = [
        torch.cat([g[n].flatten() for n in found.exact]) for g in (found.masked, found.exact)
    ]
    assert one.gradient.error > 0.01
    assert_close(one.gradient, likeness(*everything))
    for index, layer in enumerate(one.layers):
        names = [n for n in found.exact if f"layers.{index}." in n]
        assert len(names) > 5
        own = [torch.cat([g[n].flatten() for n in names]) for g in (found.masked, found.exact)]
        assert_close(layer.gradient, likeness(*own))
        # The last token predicts nothing and is not run.
        outputs = found.masked_outputs[index][:, :-1], found.exact_outputs[index][:, :-1]
        assert layer.output.error > 0.01
        assert_close(layer.output, likeness(*outputs))


def explicit_mass(found: Runs, layer: int, rows: torch.Tensor) -> tuple[float, float]:
    """(mass, past_mass) of query rows from one explicit softmax per row and head, in fp64."""
    q, k = found.visible.seen[layer]
    k = k[:, :, :-1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    group = q.shape[1] // found.visible.seen[layer][1].shape[1]
    mask = found.visible.of_layer(layer, q.shape[1] // group, 0)[:, :, :-1, :-1]
    mask = mask.repeat_interleave(group, dim=1)
    scores = q[:, :, :-1].double() @ k.double().transpose(-1, -2) * found.scale
    index = torch.arange(TOKENS - 1)
    weights = scores.masked_fill(index[None] > index[:, None], -torch.inf).softmax(-1)
    seen = (weights * mask).sum(-1)[:, :, rows].mean()
    past = index[None] < (index - index % CHUNK)[:, None]
    lists = found.visible.selection[layer]
    chose = torch.tensor([lists[int(t) // CHUNK] is not None for t in rows])
    of_rows = [(weights * past * m).sum(-1)[:, :, rows[chose]].sum() for m in (mask, 1)]
    return float(seen), float(of_rows[0] / of_rows[1])


@pytest.mark.parametrize("sample_blocks", [99, 5])
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_mass_is_that_of_an_explicit_softmax(
    name: str,
    rule: oomb.TopKPages,
    sample_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oomb.audit.mass._SLAB_PAGES", 3)  # several slabs even here
    found = runs(name, rule, sample_blocks=sample_blocks)
    blocks = found.audit.sampled_blocks
    assert len(blocks) == min(sample_blocks, found.audit.num_blocks) and blocks[-1] == 18
    rows = torch.tensor([t for t in range(TOKENS - 1) if t // PAGE in blocks])
    for index, layer in enumerate(found.audit.sparse[0].layers):
        mass, past_mass = explicit_mass(found, index, rows)
        assert layer.mass is not None and layer.past_mass is not None
        assert 0.1 < mass < 0.99
        assert abs(layer.mass - mass) < CLOSE
        assert abs(layer.past_mass - past_mass) < CLOSE


def test_outputs_are_compared_at_the_sampled_blocks() -> None:
    found = runs("llama", oomb.TopKPages(budget=2), sample_blocks=3)
    blocks = found.audit.sampled_blocks
    assert blocks == [5, 12, 18]
    rows = torch.tensor([t for t in range(TOKENS - 1) if t // PAGE in blocks])
    for index, layer in enumerate(found.audit.sparse[0].layers):
        outputs = found.masked_outputs[index][:, rows], found.exact_outputs[index][:, rows]
        assert_close(layer.output, likeness(*outputs))


def test_tokens_behind_the_last_target_are_no_blocks() -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    labels = ids.clone()
    labels[:, 65:] = -100  # token 63 predicts the last target
    found = audit(
        model,
        ids,
        labels,
        config=CONFIG,
        attention=[oomb.TopKPages(budget=1)],
        sample_blocks=1,
    )
    assert found.num_blocks == 16 and found.sampled_blocks == [15] and found.num_tokens == TOKENS
    assert all(layer.mass is not None and 0 < layer.mass < 1 for layer in found.sparse[0].layers)
    labels[:] = -100
    with pytest.raises(ValueError, match="labels: expected at least one token to predict"):
        audit(model, ids, labels, config=CONFIG, attention=[oomb.TopKPages()])


def test_whole_budget_is_exact() -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    rule = oomb.TopKPages(budget=TOKENS // PAGE + 1)
    found = audit(model, ids, ids, config=CONFIG, attention=[rule])
    (one,) = found.sparse
    assert one.loss == pytest.approx(found.loss, rel=1e-12)
    assert one.gradient.error < 1e-12 and abs(one.gradient.cosine - 1) < 1e-12
    for layer in one.layers:
        assert layer.output.error < 1e-12 and layer.mass == 1.0 and layer.past_mass is None


def test_the_budget_of_all_pages_but_none_has_all_the_mass() -> None:
    """A budget one short of the last chunk's past: only its blocks choose, and leave a page out."""
    model, ids = make("llama"), random_ids(1, TOKENS)
    past = 64 // PAGE
    rules = [oomb.TopKPages(budget=past - 1), oomb.TopKPages(budget=past)]
    less, all_pages = audit(
        model, ids, ids, config=CONFIG, attention=rules, sample_blocks=99
    ).sparse
    for short, whole in zip(less.layers, all_pages.layers, strict=True):
        assert whole.mass == 1.0
        assert short.past_mass is not None and 0.5 < short.past_mass < 1.0


def test_layers_with_a_window_say_so() -> None:
    model, ids = make("mistral"), random_ids(1, TOKENS)
    (one,) = audit(model, ids, ids, config=CONFIG, attention=[oomb.TopKPages(budget=1)]).sparse
    assert all(layer.mass is None and layer.output.error < 1e-12 for layer in one.layers)
    assert one.gradient.error < 1e-12


def test_frozen_layers_have_no_gradient() -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    model.get_decoder().layers[1].requires_grad_(False)
    rule = oomb.SampledChunks(keep=0.5)
    found = audit(
        model,
        ids,
        ids,
        config=CONFIG,
        attention=[oomb.TopKPages(budget=1)],
        backward=[rule],
        draws=2,
    )
    assert [layer.gradient is None for layer in found.sparse[0].layers] == [False, True, False]
    assert [layer is None for layer in found.sampled[0].layers] == [False, True, False]


def test_adapters_alone_are_compared() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, ids = peft.get_peft_model(make("llama"), lora).eval().double(), random_ids(1, TOKENS)
    rule = oomb.TopKPages(budget=2)
    (one,) = audit(model, ids, ids, config=CONFIG, attention=[rule]).sparse
    settings = {"chunk_size": CHUNK, "page_size": PAGE}
    found = chunked(model, oomb.Config(**settings, attention=rule), ids, ids).gradients
    exact = chunked(model, oomb.Config(**settings), ids, ids).gradients
    for index, layer in enumerate(one.layers):
        names = [n for n in exact if f"layers.{index}." in n]
        assert len(names) == 4 and all("lora" in n for n in names)
        pair = [torch.cat([g[n].flatten() for n in names]) for g in (found, exact)]
        assert_close(layer.gradient, likeness(*pair))


def test_tiers_change_no_figure() -> None:
    model, ids = make("llama"), random_ids(2, TOKENS)
    small = oomb.Config(
        chunk_size=CHUNK, page_size=PAGE, device_memory=60_000, host_memory=10_000_000
    )
    arguments: Any = {"attention": [oomb.TopKPages(budget=3)], "backward": [oomb.SampledChunks()]}
    spilled = audit(model, ids, ids, config=small, draws=3, **arguments)
    assert spilled == audit(model, ids, ids, config=CONFIG, draws=3, **arguments)


# The model ----------------------------------------------------------------------------------------


def state_of(model: PreTrainedModel) -> Any:
    return (
        [
            (m, m.training, len(m._forward_hooks), m.__dict__.get("forward"))
            for m in model.modules()
        ],
        [
            (p, p._version, p.grad, None if p.grad is None else p.grad.clone())
            for p in model.parameters()
        ],
        model.config._attn_implementation,
        torch.get_rng_state(),
    )


def assert_untouched(model: PreTrainedModel, before: Any) -> None:
    after = state_of(model)
    assert before[0] == after[0]
    for (p, version, grad, values), (q, now, grad_now, _) in zip(before[1], after[1], strict=True):
        assert p is q and version == now and grad is grad_now
        assert grad is None or torch.equal(grad, values)
    assert before[2] == after[2] and torch.equal(before[3], after[3])


@pytest.fixture
def used_model() -> PreTrainedModel:
    """In training mode but for a layer, with gradients but for a layer."""
    model = make("llama").train()
    model.get_decoder().layers[0].eval()
    for parameter in model.get_decoder().layers[1:].parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_nothing_of_the_model_changes(used_model: PreTrainedModel) -> None:
    ids, before = random_ids(1, TOKENS), state_of(used_model)
    audit(
        used_model,
        ids,
        ids,
        config=CONFIG,
        attention=[oomb.TopKPages(budget=2)],
        backward=[oomb.SampledChunks(keep=0.5)],
        draws=2,
    )
    assert_untouched(used_model, before)


def test_nothing_of_the_model_changes_when_it_fails(used_model: PreTrainedModel) -> None:
    ids, before = random_ids(1, TOKENS), state_of(used_model)

    def fail(told: str) -> None:
        if "gradient" in told and "budget" in told:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(
            used_model,
            ids,
            ids,
            config=CONFIG,
            attention=[oomb.TopKPages(budget=2)],
            on_call=fail,
        )
    assert_untouched(used_model, before)


def test_gradients_the_model_has_do_not_matter(used_model: PreTrainedModel) -> None:
    ids, rule = random_ids(1, TOKENS), oomb.TopKPages(budget=2)
    with_gradients = audit(used_model, ids, ids, config=CONFIG, attention=[rule])
    used_model.zero_grad()
    assert audit(used_model.eval(), ids, ids, config=CONFIG, attention=[rule]) == with_gradients


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "attention, backward, kv_grad_dtype: expected something to audit, got none"),
        ({"kv_grad_dtype": "float16"}, "kv_grad_dtype: expected 'bfloat16' or None, got 'float16'"),
        ({"attention": [oomb.Dense()]}, "attention: expected oomb.PageRule rules, got Dense"),
        (
            {"backward": [oomb.AllChunks()]},
            "backward: expected oomb.SampledChunks or oomb.TruncatedChunks rules",
        ),
        ({"backward": [oomb.SampledChunks()], "draws": 1}, "draws: expected an int >= 2"),
        ({"attention": [oomb.TopKPages()], "sample_blocks": 0}, "sample_blocks: expected"),
        ({"attention": [oomb.TopKPages()], "tolerance": 0}, "tolerance: expected a number > 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(make("llama"), random_ids(1, 20), random_ids(1, 20), config=CONFIG, **arguments)


def test_model_without_trained_parameters_is_refused() -> None:
    model, ids = make("llama").requires_grad_(False), random_ids(1, 20)
    with pytest.raises(ValueError, match="model: expected parameters that require gradients"):
        audit(model, ids, ids, config=CONFIG, attention=[oomb.TopKPages()])


@pytest.mark.parametrize(
    "rules",
    [
        {"backward": [oomb.SampledChunks()], "draws": 2},
        {"backward": [oomb.TruncatedChunks(window=1)]},
        {"attention": [oomb.TopKPages()]},
    ],
    ids=["sampled", "truncated", "sparse"],
)
@pytest.mark.parametrize(("value", "norm"), [(0.0, "0"), (float("inf"), "inf"), (torch.nan, "nan")])
def test_gradients_that_nothing_can_be_compared_with_are_refused(
    rules: dict[str, Any], value: float, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is trained is reached, or a value overflows."""
    model, ids = make("llama").requires_grad_(False), random_ids(1, TOKENS)
    model.unreached = nn.Parameter(torch.zeros(3))
    if value:
        monkeypatch.setattr("oomb.audit.gradients._dot", lambda *_: value)
    message = f"model: expected a gradient that is finite and not zero .* got one of norm {norm}$"
    with pytest.raises(ValueError, match=message):
        audit(model, ids, ids, config=CONFIG, **rules)


@pytest.mark.parametrize(("number", "most"), [(5, 9), (9, 9), (100, 7), (33, 32), (1, 1)])
def test_blocks_are_spread_evenly(number: int, most: int) -> None:
    places = evenly(number, most)
    assert len(places) == min(number, most) and places[-1] == number - 1
    gaps = [b - a for a, b in itertools.pairwise([-1, *places])]
    assert max(gaps) - min(gaps) <= 1


def test_padded_lists_name_no_page() -> None:
    """A list may hold fewer pages than the budget, -1 behind them; one may be empty."""
    q, k = torch.randn(1, 2, 4, 8).double(), torch.randn(1, 1, 12, 8).double()
    lists = torch.tensor([[[[1, -1]], [[-1, -1]]]], dtype=torch.int32)  # [1, 2 blocks, 1, 2]
    found = attention_mass(
        LayerAttention(0.5, 0.0, q, k),
        [4, 5],
        [None, None, lists],
        chunk_size=4,
        page_size=2,
        device=torch.device("cpu"),
    )
    weights = (
        (0.5 * q @ k.transpose(-1, -2))
        .masked_fill(torch.arange(12) > torch.arange(8, 12)[:, None], -torch.inf)
        .softmax(-1)
    )
    own = weights[..., 8:].sum()
    assert found.rows == 8
    assert abs(found.seen - float(own + weights[:, :, :2, 2:4].sum())) < CLOSE
    assert abs(found.past_seen - float(weights[:, :, :2, 2:4].sum())) < CLOSE
    assert abs(found.past - float(weights[..., :8].sum())) < CLOSE
