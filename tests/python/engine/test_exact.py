"""Loss and gradients in fp64 equal those of one ordinary forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from oomb.core.attention import ChunkAttention
from oomb.core.chunk_run import ChunkRun

from .models import ARCHITECTURES, ROPES, make
from .reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    take_gradients,
)


def config(**settings: object) -> oomb.Config:
    return oomb.Config(**{"chunk_size": 16, "page_size": 8, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.sampled(12)
def test_architectures(name: str, recompute: str) -> None:
    """A batch of 2, 5 chunks, the last partial, with a chunk and a half masked."""
    model = make(name)
    ids = random_ids(2, 75)
    labels = ids.clone()
    labels[0, 14:40] = -100
    expected = ordinary(model, ids, labels)
    assert_equal(chunked(model, config(recompute=recompute), ids, labels), expected)


@pytest.mark.parametrize("tokens", [30, 75], ids=["short", "long"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope(rope: str, tokens: int) -> None:
    name, settings = ROPES[rope]
    model = make(name, **settings)
    ids = random_ids(1, tokens)
    assert_equal(chunked(model, config(), ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_follows_the_length_of_each_call(rope: str) -> None:
    """These variants keep state in the model between calls."""
    name, settings = ROPES[rope]
    model = make(name, **settings)
    with oomb.Engine(model, config()) as engine:
        for tokens in (75, 30, 60, 75):
            ids = random_ids(1, tokens)
            expected = ordinary(make(name, **settings), ids, ids)
            model.zero_grad()
            step = engine.forward_backward(ids, ids)
            assert float(abs(step.loss - expected.loss)) <= 1e-12 * float(expected.loss)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_forward_between_two_passes_changes_no_angle(rope: str) -> None:
    """One on a longer text, as of a reference or a generation."""
    name, settings = ROPES[rope]
    model, ids = make(name, **settings), random_ids(1, 60)

    def swept(engine: oomb.Engine, between: bool) -> Result:
        with engine.two_pass(ids, ids) as call:
            loss = call.logprobs.sum()
            loss.backward()
            if between:
                with torch.no_grad():
                    model(random_ids(1, 150))
            call.sweep()
        return Result(loss.detach(), take_gradients(model))

    with oomb.Engine(model, config()) as engine:
        assert_identical(swept(engine, True), swept(engine, False))


# (chunk, page, tokens)
LENGTHS = [
    (16, 16, 75),
    (32, 8, 75),
    (24, 8, 75),
    (8, 8, 75),
    (16, 1, 40),
    (5, 5, 33),
    (64, 8, 64),
    (16, 8, 64),
    (16, 8, 65),  # whole chunks: the last token is not run
    (16, 8, 66),  # last chunk of one token
    (16, 8, 17),  # one chunk
    (16, 8, 16),
    (16, 8, 11),  # below a chunk
    (16, 8, 5),  # below a page
    (16, 8, 3),
    (128, 64, 75),
]


@pytest.mark.parametrize(("chunk", "page", "tokens"), LENGTHS)
def test_lengths(chunk: int, page: int, tokens: int) -> None:
    model = make("qwen2")
    ids = random_ids(1, tokens)
    result = chunked(model, oomb.Config(chunk_size=chunk, page_size=page), ids, ids)
    assert_equal(result, ordinary(model, ids, ids))


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
@pytest.mark.parametrize("tail", [1, 2, 3])
def test_soft_caps_with_tails(name: str, tail: int) -> None:
    """Last chunks of one to three tokens; the last of the text is not run."""
    model, ids = make(name), random_ids(2, 65 + tail)
    assert_equal(chunked(model, config(), ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize(("chunk", "page", "tokens"), LENGTHS[:6])
def test_lengths_with_windows(chunk: int, page: int, tokens: int) -> None:
    model = make("mistral")
    ids = random_ids(2, tokens)
    result = chunked(model, oomb.Config(chunk_size=chunk, page_size=page), ids, ids)
    assert_equal(result, ordinary(model, ids, ids))


@pytest.mark.parametrize("window", [2, 7, 8, 9, 16, 17, 40, 200])
def test_windows(window: int) -> None:
    model = make("mistral", sliding_window=window)
    ids = random_ids(1, 60)
    assert_equal(chunked(model, config(), ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 12, 32])
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    model = make(
        "qwen3", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=head_dim
    )
    ids = random_ids(1, 50)
    assert_equal(chunked(model, config(), ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss", "gemma2", "vaultgemma"])
@pytest.mark.parametrize("lengths", [(75, 50, 9), (16, 75, 17), (75, 75, 1), (40, 32, 48)], ids=str)
def test_right_padding(name: str, lengths: tuple[int, ...]) -> None:
    """Three sequences; whole chunks of some are padding; padded labels are ignored."""
    model = make(name)
    ids = random_ids(3, 75)
    mask = torch.arange(75)[None] < torch.tensor(lengths)[:, None]
    ids[~mask] = 0
    labels = ids.masked_fill(~mask, -100)
    expected = ordinary(model, ids, labels, attention_mask=mask.long())
    assert_equal(chunked(model, config(), ids, labels, attention_mask=mask.long()), expected)


def test_labels_on_padding_are_counted() -> None:
    """As in an ordinary call: a label is ignored where it is -100, not where it is padding."""
    model = make("llama")
    ids = random_ids(3, 75)
    mask = torch.arange(75)[None] < torch.tensor([75, 50, 9])[:, None]
    expected = ordinary(model, ids, ids, attention_mask=mask.long())
    assert_equal(chunked(model, config(), ids, ids, attention_mask=mask.long()), expected)


# Slices of labels that stay, in chunks of 16.
MASKS = {
    "first chunk": [slice(0, 16)],
    "last chunk": [slice(64, 75)],
    "middle chunk": [slice(32, 48)],
    "all but two chunks": [slice(16, 32), slice(60, 64)],
    "one token": [slice(40, 41)],
    "first target of a chunk": [slice(48, 49)],
    "last token": [slice(74, 75)],
    "third token": [slice(2, 3)],
}


@pytest.mark.parametrize("kept", MASKS)
def test_label_masks(kept: str) -> None:
    model = make("qwen2-tied")
    ids = random_ids(2, 75)
    labels = torch.full_like(ids, -100)
    for part in MASKS[kept]:
        labels[0, part] = ids[0, part]
    assert_equal(chunked(model, config(), ids, labels), ordinary(model, ids, labels))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # its new name is too new
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_switched_on_beforehand(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gradients, with no attention run a second time; afterwards it is on again."""
    calls: list[int] = []
    forward = ChunkAttention.forward

    def counted(self: ChunkAttention, run: ChunkRun, layer: int, *arguments: Any) -> Any:
        calls.append(layer)
        return forward(self, run, layer, *arguments)

    monkeypatch.setattr(ChunkAttention, "forward", counted)
    model = make("llama")
    ids = random_ids(1, 60)
    expected = ordinary(model, ids, ids)
    chunked(model, config(), ids, ids)
    without = len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert model.model.gradient_checkpointing
    for recompute in ("none", "layer"):
        calls.clear()
        assert_equal(chunked(model, config(recompute=recompute), ids, ids), expected)
        assert len(calls) == without
    assert model.model.gradient_checkpointing
    assert_equal(ordinary(model, ids, ids), expected)


def test_frozen_parameters() -> None:
    """As in fine-tuning of some layers: no gradient appears where none is wanted."""
    model = make("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    ids = random_ids(1, 60)
    expected = ordinary(model, ids, ids)
    assert all("layers.1" in name for name in expected.gradients)
    for recompute in ("none", "layer"):
        assert_equal(chunked(model, config(recompute=recompute), ids, ids), expected)


def test_the_model_is_as_before() -> None:
    """Its attention, layers, angles and mode; its ordinary forward has the same bits."""
    model = make("llama")
    ids = random_ids(1, 40)
    before = model(input_ids=ids).logits
    chunked(model, config(recompute="layer"), ids, ids)
    assert model.config._attn_implementation == "sdpa"
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    changed = [m for m in model.modules() if "forward" in vars(m) and m not in norms]
    assert changed == []
    assert not model.training
    assert torch.equal(model(input_ids=ids).logits, before)
