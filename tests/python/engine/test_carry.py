"""Layers that hand states from token to token: gradients in fp64 equal those of one backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch.nn import functional as F

import oomb
from oomb.audit.audit import audit
from oomb.core.border_states import BorderStates
from oomb.model.mixers import Mixer, StateCache
from oomb.plan import Planner

from .recurrent_models import RECURRENT, make_recurrent, nothing_rounds_to_float32
from .reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    take_gradients,
    worst_error,
)
from .tiers import HOST

FEW = ("qwen3.5", "nemotron-h", "falcon-h1", "lfm2")  # one of each kind of state


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(**{"chunk_size": 16, "page_size": 8, **settings})


def by_documents(model: Any, ids: torch.Tensor, starts: torch.Tensor) -> Result:
    """Each document by itself through the model's own forward; the loss over all of them."""
    model.zero_grad()
    terms = []
    for row, of_row in zip(ids, starts, strict=True):
        for document in row.tensor_split(of_row.nonzero().flatten()[1:]):
            if len(document) < 2:
                continue
            logits = model(input_ids=document[None], use_cache=False).logits
            terms.append(F.cross_entropy(logits[0, :-1], document[1:], reduction="none"))
    loss = torch.cat(terms).mean()
    loss.backward()
    return Result(loss.detach(), take_gradients(model))


def document_ids(batch: int, tokens: int, starts: list[list[int]]) -> torch.Tensor:
    first = torch.zeros(batch, tokens, dtype=torch.int64)
    for row, of_row in enumerate(starts):
        first[row, of_row] = 1
    return first.cumsum(1)


@pytest.mark.parametrize("name", RECURRENT)
def test_families(name: str) -> None:
    """Tails of 1, 2 and 3 tokens (the last one predicts nothing), with and without recompute."""
    model = make_recurrent(name)
    for tokens, recompute in ((34, "layer"), (35, "none"), (36, "layer")):
        ids = random_ids(1, tokens)
        expected = ordinary(model, ids, ids)
        result = chunked(model, config(recompute=recompute), ids, ids)
        assert_equal(result, expected)
        assert result.step is not None
        assert result.step.stats.border_state_bytes > 0


# First tokens of documents, of two sequences of 52 tokens in chunks of 16.
DOCUMENTS = [
    [[16], [32]],  # at a border
    [[15], [17]],  # a token before, a token behind
    [[16, 17, 18], [30, 31, 32, 33]],  # of a token each, around a border
    [[5, 20, 21, 40], []],  # one sequence is a single document
    [[1], [51]],
]


@pytest.mark.parametrize("name", RECURRENT)
def test_documents(name: str) -> None:
    model = make_recurrent(name)
    cases = DOCUMENTS if name in FEW else DOCUMENTS[2:3]
    for number, starts in enumerate(cases):
        ids = random_ids(2, 52)
        documents = document_ids(2, 52, starts)
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        recompute = ("none", "layer")[number % 2]
        settings = config(recompute=recompute)
        result = chunked(model, settings, ids, ids, document_ids=documents)
        assert_equal(result, by_documents(model, ids, first))


@pytest.mark.parametrize("name", FEW)
def test_batch_with_padding(name: str) -> None:
    model = make_recurrent(name)
    ids = random_ids(3, 50)
    mask = torch.ones_like(ids)
    mask[1, 33:], mask[2, 7:] = 0, 0
    labels = torch.where(mask.bool(), ids, -100)
    expected = ordinary(model, ids, labels, attention_mask=mask)
    assert_equal(chunked(model, config(), ids, labels, attention_mask=mask), expected)


@pytest.mark.parametrize("name", FEW)
def test_tiers_change_no_bit(name: str) -> None:
    model = make_recurrent(name)
    ids = random_ids(2, 75)
    roomy = chunked(model, config(), ids, ids)
    small = config(device_memory=16 * 2**10, host_memory=HOST)
    result = chunked(model, small, ids, ids)
    assert_identical(result, roomy)
    assert result.step is not None
    assert result.step.stats.host_peak_bytes > 0


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "lfm2"])
def test_adapters_on_upper_layers(name: str) -> None:
    """States below the first trained layer need no gradient."""
    model = make_recurrent(name)
    last = len(model.model.layers) - 1
    modules = {"qwen3.5": ["in_proj_qkv"], "nemotron-h": ["in_proj"], "lfm2": ["in_proj"]}[name]
    settings = peft.LoraConfig(target_modules=modules, layers_to_transform=[last], r=2)
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter, dtype=torch.float64)
    ids = random_ids(1, 60)
    for recompute in ("none", "layer"):
        result = chunked(adapted, config(recompute=recompute), ids, ids)
        assert_equal(result, ordinary(adapted, ids, ids))  # type: ignore[arg-type]
        assert result.gradients


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1"])
def test_sparse_attention(name: str) -> None:
    """A rule that takes every page is dense attention; a smaller one still sweeps."""
    model = make_recurrent(name)
    ids = random_ids(2, 75)
    all_pages = oomb.TopKPages(budget=16)
    assert_equal(chunked(model, config(attention=all_pages), ids, ids), ordinary(model, ids, ids))
    few = config(attention=oomb.TopKPages(budget=2), record_selection=True)
    spilled = oomb.Config(**{**vars(few), "device_memory": 2**15, "host_memory": HOST})
    first, second = (chunked(model, settings, ids, ids) for settings in (few, spilled))
    assert_identical(first, second)


@pytest.mark.parametrize("name", FEW)
def test_evaluate_and_kept_outputs(name: str) -> None:
    model = make_recurrent(name)
    ids = random_ids(1, 70)
    expected = ordinary(model, ids, ids)
    assert_equal(chunked(model, config(keep_outputs="auto"), ids, ids), expected)
    with oomb.Engine(model, config()) as engine:
        step = engine.evaluate(ids, ids)
        assert float(abs(step.loss - expected.loss)) <= 1e-12 * float(expected.loss)
        assert step.stats.border_state_bytes == 0


@pytest.mark.parametrize("name", FEW)
def test_two_passes(name: str) -> None:
    model = make_recurrent(name)
    ids = random_ids(1, 70)
    expected = ordinary(model, ids, ids)
    with oomb.Engine(model, config()) as engine, engine.two_pass(ids, ids) as call:
        loss = -call.logprobs.sum() / 69
        loss.backward()  # type: ignore[no-untyped-call]
        call.sweep()
    assert_equal(Result(loss.detach(), take_gradients(model)), expected)


def test_plan_counts_border_states() -> None:
    model = make_recurrent("qwen3.5")
    with oomb.Engine(model, config()) as engine:
        short, long = (engine.plan(tokens).host_bytes for tokens in (17, 161))
        ids = random_ids(1, 161)
        kept = engine.forward_backward(ids, ids).stats.border_state_bytes
    assert short == 0
    assert 0.8 * kept <= long <= kept


@pytest.mark.parametrize("rule", [oomb.SampledChunks(), oomb.TruncatedChunks(window=1)])
def test_gradients_that_leave_out_borders_are_refused(rule: Any) -> None:
    text = rf"layers\.0\.linear_attn .*{type(rule).__name__} cannot leave out"
    with pytest.raises(oomb.UnsupportedModelError, match=text):
        oomb.Engine(make_recurrent("qwen3.5"), config(backward=rule))


def test_one_token_chunks_are_refused() -> None:
    model = make_recurrent("lfm2")
    with pytest.raises(oomb.UnsupportedModelError, match="chunk_size: expected at least 2"):
        oomb.Engine(model, oomb.Config(chunk_size=1, page_size=1))


def _no_gradient(self: BorderStates) -> Any:
    return [], []


def _no_state(self: StateCache, layer_idx: int, state_idx: int = 0) -> None:
    return None


def _no_joining(self: StateCache, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    self.left["conv", 0] = states[..., :1]
    return states


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (BorderStates, "roots", _no_gradient),
        (Mixer, "trains", lambda self, hidden: False),
    ],
)
def test_these_tests_can_fail(owner: Any, method: str, broken: Any) -> None:
    model, ids = make_recurrent("qwen3.5"), random_ids(1, 50)
    expected = ordinary(model, ids, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, broken)
        assert worst_error(chunked(model, config(), ids, ids), expected)[0] > 1e-4


@pytest.mark.parametrize(
    ("method", "broken"),
    [("get_recurrent_state", _no_state), ("update_conv_state", _no_joining)],
)
def test_a_state_that_does_not_come_back_is_refused(method: str, broken: Any) -> None:
    """A mixer that starts anew behind each border, as Mamba-1's do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateCache, method, broken)
        with pytest.raises(oomb.UnsupportedModelError, match=r"linear_attn .* starts anew"):
            oomb.Engine(make_recurrent("qwen3.5"), config())


def test_layers_are_counted_in_what_a_call_reports() -> None:
    """Selections, waits and windows have a place for each decoder layer."""
    model, ids = make_recurrent("qwen3.5"), random_ids(1, 75)
    rule = oomb.TopKPages(budget=2)
    with oomb.Engine(model, config(attention=rule, record_selection=True)) as engine:
        step = engine.forward_backward(ids, ids)
        assert engine.layer_windows == [0, 0, 0]
    assert [x is not None for x in (of[4] for of in step.selection)] == [False, True, False]
    assert all(len(of_pass) == 3 for of_pass in step.stats.exposed_by_layer.values())


def test_audit_of_a_model_with_states() -> None:
    model, ids = make_recurrent("qwen3.5"), random_ids(1, 75)
    found = audit(model, ids, ids, config=config(), attention=[oomb.TopKPages(budget=2)])
    masses = [layer.mass is not None for layer in found.sparse[0].layers]
    assert masses == [False, True, False]


def test_a_prediction_counts_border_states() -> None:
    model, ids = make_recurrent("nemotron-h"), random_ids(2, 161)
    predicted = Planner(model).predict(161, config(), batch_size=2, timed=False)
    step = chunked(model, config(), ids, ids).step
    assert step is not None
    kept = step.stats.border_state_bytes
    assert 0.8 * kept <= predicted.border_bytes <= kept
