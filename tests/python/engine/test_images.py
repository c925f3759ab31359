"""Images among tokens: features, positions and masks of the whole sequence, exact in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import oomb

from .image_models import FAMILIES, IMAGE, OTHERS, VIDEO, Batch, batch_of, make_with_images
from .recurrent_models import nothing_rounds_to_float32
from .reference import EXACT, Result, chunked, ordinary, take_gradients, worst_error

CONFIG = oomb.Config(chunk_size=16, page_size=4)


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


def image(family: str, begin: int) -> tuple[int, int, int]:
    return (begin, 2, 2) if family == "gemma3" else (begin, 3, 2)


def assert_exact(value: Result, expected: Result) -> None:
    error, where = worst_error(value, expected)
    assert error <= EXACT, where


def assert_as_ordinary(model: Any, config: oomb.Config, batch: Batch, **others: Any) -> Result:
    ids = batch.input_ids
    expected = ordinary(model, ids, ids, **batch.arguments, **others)
    value = chunked(model, config, ids, ids, **batch.arguments, **others)
    assert_exact(value, expected)
    return value


# Where images begin in each row; chunks of 16 tokens.
PLACES = {
    "inside, at a border, at the end": ([3, 16, 64], [40]),
    "around borders": ([11, 31], [15, 47]),
    "neighbours, and at the start": ([0, 7, 14, 21, 28], [13]),
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tower_and_text_train_exactly(family: str, places: tuple[list[int], ...]) -> None:
    model = make_with_images(family)
    rows = [[image(family, begin) for begin in row] for row in places]
    recompute: Any = "layer" if len(places[0]) == 2 else "none"
    config = replace(CONFIG, recompute=recompute)
    if family.startswith("gemma"):  # chunks end between images
        config = replace(config, chunk_size=32, page_size=2)
    value = assert_as_ordinary(model, config, batch_of(family, rows, 70))
    assert any("vis" in name for name in value.gradients)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str) -> None:
    batch = batch_of(family, [[(5, 2, 2), (30, 2, 2)], [(13, 3, 2)]], 60)
    assert_as_ordinary(make_with_images(family), CONFIG, batch)


def test_a_video_beside_an_image() -> None:
    batch = batch_of("qwen3-vl", [[(30, 2, 2)]], 60)
    for begin in (6, 14):  # frames, a time in text before each
        batch.input_ids[0, begin : begin + 6] = VIDEO
        batch.arguments["mm_token_type_ids"][0, begin : begin + 6] = 2
    batch.arguments["pixel_values_videos"] = torch.randn(48, 96, dtype=torch.float64)
    batch.arguments["video_grid_thw"] = torch.tensor([[2, 4, 6]])
    assert_as_ordinary(make_with_images("qwen3-vl"), CONFIG, batch)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
def test_an_image_longer_than_a_chunk(family: str) -> None:
    batch = batch_of(family, [[(9, 6, 8)], [(20, 4, 3)]], 70)
    assert_as_ordinary(make_with_images(family), CONFIG, batch)


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_padding_and_frozen_tower(family: str) -> None:
    model = make_with_images(family)
    model.requires_grad_(False)
    model.get_decoder().layers[1:].requires_grad_(True)
    batch = batch_of(family, [[image(family, 5), image(family, 40)], [image(family, 12)]], 60)
    mask = torch.ones_like(batch.input_ids)
    mask[1, 35:] = 0
    labels = batch.input_ids.masked_fill(mask == 0, -100)
    expected = ordinary(model, batch.input_ids, labels, attention_mask=mask, **batch.arguments)
    value = chunked(model, CONFIG, batch.input_ids, labels, attention_mask=mask, **batch.arguments)
    assert_exact(value, expected)


def test_only_the_projector_trains() -> None:
    model = make_with_images("gemma3")
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    value = assert_as_ordinary(model, CONFIG, batch_of("gemma3", [[(5, 2, 2), (30, 2, 2)]], 60))
    assert set(value.gradients) == {
        "model.multi_modal_projector.mm_input_projection_weight",
        "model.multi_modal_projector.mm_soft_emb_norm.weight",
    }


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5", "gemma3"])
def test_packed_documents(family: str) -> None:
    """Each document as if it were alone."""
    model, length = make_with_images(family), (23, 37)
    parts = [
        batch_of(family, [[image(family, 4)]], length[0], seed=1),
        batch_of(family, [[image(family, 0), image(family, 21)]], length[1], seed=2),
    ]
    model.zero_grad()
    losses = []
    number = sum(length) - 2
    for part in parts:
        ids = part.input_ids
        logits = model(input_ids=ids, use_cache=False, **part.arguments).logits
        terms = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        losses.append(terms / number)
    total = torch.stack(losses).sum()
    total.backward()
    expected = Result(total.detach(), take_gradients(model))

    def joined(name: str) -> torch.Tensor:
        along = 1 if name in ("mm_token_type_ids", "token_type_ids") else 0
        return torch.cat([part.arguments[name] for part in parts], dim=along)

    ids = torch.cat([part.input_ids for part in parts], dim=1)
    documents = torch.arange(2).repeat_interleave(torch.tensor(length))[None]
    arguments = {name: joined(name) for name in parts[0].arguments}
    furthest: list[int] = []

    def note(_: Any, args: tuple[Any, ...]) -> None:
        furthest.append(int(args[1].max()))

    with oomb.Engine(model, CONFIG) as engine:
        model.get_decoder().rotary_emb.register_forward_pre_hook(note)
        step = engine.forward_backward(ids, ids, document_ids=documents, **arguments)
    assert_exact(Result(step.loss, take_gradients(model)), expected)
    assert max(furthest) < max(length)


def test_positions_that_are_given() -> None:
    model = make_with_images("qwen3-vl")
    batch = batch_of("qwen3-vl", [[(5, 3, 4)]], 60)
    positions = torch.arange(60).expand(3, 1, 60).clone()
    positions[1:] += torch.randint(0, 5, (2, 1, 60))
    assert_as_ordinary(model, CONFIG, batch, position_ids=positions)


def test_evaluation_and_a_small_device() -> None:
    model = make_with_images("qwen3-vl")
    batch = batch_of("qwen3-vl", [[(5, 3, 4), (30, 3, 3)]], 80)
    ids = batch.input_ids
    config = replace(CONFIG, device_memory=64 * 2**10, host_memory=2**24)
    expected = ordinary(model, ids, ids, **batch.arguments)
    model.model.rope_deltas = None
    with oomb.Engine(model, config) as engine:
        step = engine.evaluate(ids, ids, **batch.arguments)
        assert float((step.loss - expected.loss).abs()) < 1e-13
        trained = engine.forward_backward(ids, ids, **batch.arguments)
    assert trained.stats.h2d_bytes > 0
    assert_exact(Result(trained.loss, take_gradients(model)), expected)
    assert model.model.rope_deltas is None


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_evaluation_of_tokens_seen_both_ways(family: str) -> None:
    """The head of the one asks the embedding, too."""
    model, batch = make_with_images(family), batch_of(family, [[image(family, 5)]], 60)
    ids = batch.input_ids
    with oomb.Engine(model, CONFIG) as engine:
        loss = engine.evaluate(ids, ids, **batch.arguments).loss
    assert float((loss / ordinary(model, ids, ids, **batch.arguments).loss - 1).abs()) < 1e-13


def test_lora_on_tower_and_decoder() -> None:
    peft = pytest.importorskip("peft")
    model = make_with_images("qwen3-vl")
    adapters = peft.LoraConfig(target_modules=["q_proj", "qkv"], init_lora_weights=False)
    model = peft.get_peft_model(model, adapters).double().eval()
    value = assert_as_ordinary(model, CONFIG, batch_of("qwen3-vl", [[(13, 3, 4)]], 50))
    assert any("visual" in name for name in value.gradients)


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_a_loss_in_two_passes(family: str) -> None:
    model = make_with_images(family)
    batch = batch_of(family, [[image(family, 5), image(family, 30)]], 60)
    ids = batch.input_ids
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **batch.arguments).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    loss = (logprobs.exp().sum() * 3).tanh()
    loss.backward()
    expected = Result(loss.detach(), take_gradients(model))
    with oomb.Engine(model, CONFIG) as engine:
        with engine.two_pass(ids, **batch.arguments) as call:
            value = (call.logprobs[:, 1:].exp().sum() * 3).tanh()
            value.backward()
            call.sweep()
        assert_exact(Result(value.detach(), take_gradients(model)), expected)
        with pytest.raises(ValueError, match="share_prefixes: expected rows of text alone"):
            engine.two_pass(ids, share_prefixes=True, **batch.arguments)


def test_dropout_of_a_tower_is_drawn_once() -> None:
    """Features and their gradient come from the same draw."""
    model = make_with_images("qwen3-vl")
    model.requires_grad_(False)
    bias = model.model.visual.merger.linear_fc2.bias.requires_grad_(True)
    drop = torch.nn.Dropout(0.5)
    tower = model.model.visual.merger
    plain = tower.forward
    tower.forward = lambda x: drop(plain(x))
    tower.train(), drop.train()
    batch = batch_of("qwen3-vl", [[(5, 3, 4)]], 40)
    model.train()
    torch.manual_seed(7)
    value = chunked(model, CONFIG, batch.input_ids, batch.input_ids, **batch.arguments)
    before = bias.detach().clone()
    losses = []
    for step in (1e-5, -1e-5):  # the same draw of the features again
        bias.data = before + step * value.gradients["model.visual.merger.linear_fc2.bias"]
        with oomb.Engine(model, CONFIG) as engine:
            torch.manual_seed(7)
            losses.append(engine.evaluate(batch.input_ids, batch.input_ids, **batch.arguments).loss)
    slope = float(losses[0] - losses[1]) / 2e-5
    norm = float(value.gradients["model.visual.merger.linear_fc2.bias"].square().sum())
    assert abs(slope / norm - 1) < 1e-6


# What is refused ----------------------------------------------------------------------------------


def refused(model: Any, config: oomb.Config, batch: Batch, **others: Any) -> str:
    with oomb.Engine(model, config) as engine, pytest.raises((ValueError, TypeError)) as caught:
        engine.forward_backward(batch.input_ids, batch.input_ids, **batch.arguments, **others)
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    gemma, qwen = make_with_images("gemma3"), make_with_images("qwen3-vl")
    two = batch_of("gemma3", [[(5, 2, 2), (22, 2, 2)]], 60)
    documents = (torch.arange(60) >= 7).long()[None]
    assert "document_ids: expected images inside" in refused(
        gemma, CONFIG, two, document_ids=documents
    )
    long = batch_of("gemma3", [[(1 + 4 * n, 2, 2) for n in range(12)]], 60)
    assert "chunk_size: expected a page border between images" in refused(gemma, CONFIG, long)
    sampled = replace(CONFIG, backward=oomb.SampledChunks(keep=0.5))
    for config in (sampled, replace(CONFIG, attention=oomb.TopKPages(budget=2))):
        with pytest.raises(oomb.UnsupportedModelError, match="image tokens see one another"):
            chunked(gemma, config, two.input_ids, two.input_ids, **two.arguments)
    batch = batch_of("qwen3-vl", [[(5, 3, 4)]], 40)
    exact_angles = replace(CONFIG, rope_angles="float64")
    assert refused(qwen, exact_angles, batch).startswith("rope_angles: expected 'model'")
    assert "image_position_ids: expected a model" in refused(
        qwen, CONFIG, batch, image_position_ids=batch.input_ids
    )
    assert "unexpected keyword argument 'pixels'" in refused(qwen, CONFIG, batch, pixels=None)
    fewer = Batch(batch.input_ids.masked_fill(batch.input_ids == IMAGE, 1), batch.arguments)
    assert "do not match" in refused(qwen, CONFIG, fewer)


def test_text_alone_still_trains() -> None:
    model = make_with_images("gemma3")
    ids = torch.randint(1, IMAGE, (2, 40), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, {"token_type_ids": torch.zeros_like(ids)})
    expected = ordinary(model, ids, ids)
    assert_exact(chunked(model, CONFIG, ids, ids), expected)
    assert_exact(chunked(model, CONFIG, ids, ids, **batch.arguments), expected)
