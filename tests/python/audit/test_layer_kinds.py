"""Audits of models whose layers hand on more than one stream, or states beside keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from engine import layer_classes
from engine.recurrent_models import make_recurrent, nothing_rounds_to_float32
from engine.reference import random_ids
from oomb.audit import SparseAudit, audit
from oomb.audit.outputs import Recorder
from oomb.model.causal import CausalModel

from .likeness import CHUNK, CONFIG, PAGE, TOKENS, assert_close, likeness
from .test_audit import Runs, outputs_of_layers, runs

EVEN = 4 * CHUNK + 1  # the last token is not run: four whole chunks
RULE = oomb.TopKPages(budget=2)


def assert_outputs_are_those_of_ordinary_runs(found: Runs, changed: list[bool]) -> None:
    """At the sampled rows; ``changed``: the layers that the choice of pages reaches."""
    (one,) = found.audit.sparse
    tokens = found.audit.num_tokens - 1
    rows = torch.tensor([t for t in range(tokens) if t // PAGE in found.audit.sampled_blocks])
    assert len(one.layers) == len(changed)
    for index, layer in enumerate(one.layers):
        outputs = found.masked_outputs[index], found.exact_outputs[index]
        if changed[index]:
            assert_close(layer.output, likeness(*(x[..., rows, :] for x in outputs)))
            assert layer.output.error > 0.005
        else:
            assert layer.output.error < 1e-12


def whole_budget(model: PreTrainedModel, tokens: int) -> SparseAudit:
    ids = random_ids(2, tokens)
    rule = oomb.TopKPages(budget=tokens // PAGE + 1)
    (one,) = audit(model, ids, ids, config=CONFIG, attention=[rule]).sparse
    return one


@pytest.mark.parametrize("sample_blocks", [99, 3])
@pytest.mark.parametrize("tokens", [TOKENS, EVEN])
def test_every_stream_of_gemma_3n_is_compared(tokens: int, sample_blocks: int) -> None:
    model = layer_classes.make("gemma3n")
    found = runs(model, RULE, sample_blocks=sample_blocks, tokens=tokens)
    streams = found.exact_outputs[0]
    assert streams.shape == (4, 2, tokens, model.config.hidden_size)
    # The first layer has a sliding window; those behind the second inherit its error.
    assert_outputs_are_those_of_ordinary_runs(found, [False, True, True, True, True])


def test_whole_budget_is_exact_on_every_stream() -> None:
    one = whole_budget(layer_classes.make("gemma3n"), TOKENS)
    assert all(layer.output.error < 1e-12 for layer in one.layers)


@pytest.mark.parametrize("sample_blocks", [99, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [TOKENS, EVEN])
def test_recurrent_layers_are_compared_at_their_own_tokens(
    tokens: int, batch: int, sample_blocks: int
) -> None:
    """Their first layers run once more, on one token, before the chunks of a call do."""
    with nothing_rounds_to_float32():
        model = make_recurrent("qwen3.5")
        found = runs(model, RULE, batch, sample_blocks, tokens)
        assert_outputs_are_those_of_ordinary_runs(found, [False, True, True])


@pytest.mark.parametrize("kind", ["gemma3n", "qwen3.5", "lfm2"])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_recorded_is_what_one_forward_gives(kind: str, batch: int) -> None:
    """Of each layer at chosen tokens: an error in both runs alike would not show in a figure."""
    with nothing_rounds_to_float32():
        model = layer_classes.make(kind) if kind == "gemma3n" else make_recurrent(kind)
        ids, rows = random_ids(batch, TOKENS), torch.arange(TOKENS) % 5 < 2
        recorder = Recorder(CausalModel(model), rows, attention=False)
        with oomb.Engine(model, CONFIG) as engine, recorder.recording():
            engine.evaluate(ids, ids)
        with torch.no_grad(), outputs_of_layers(model) as outputs:
            model(input_ids=ids, use_cache=False)
    assert recorder.tokens == TOKENS - 1  # the last one predicts nothing
    for layer, whole in enumerate(outputs):
        expected = whole[..., :-1, :][..., rows[:-1], :]
        torch.testing.assert_close(recorder.outputs(layer), expected, rtol=1e-9, atol=1e-9)
