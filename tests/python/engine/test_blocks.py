"""Layers that see their own block of tokens, and queries that grow with their place (Llama 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import oomb
from oomb.core import call_pages
from oomb.model import interface
from oomb.plan import Machine, Planner

from .block_models import (
    IMAGE,
    PER_IMAGE,
    make,
    make_with_images,
    random_images,
    rotation_in_own_dtype,
)
from .reference import (
    EXACT,
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
    worst_error,
)

CONFIG = oomb.Config(chunk_size=16, page_size=8, recompute="none")
PAGE_BYTES = 2 * 2 * 8 * 8 * 8  # K and V of two heads of 8, 8 tokens, fp64
TIGHT = {"device_memory": 10 * PAGE_BYTES, "host_memory": "1MiB"}


@pytest.fixture(autouse=True)
def _in_own_dtype() -> Iterator[None]:
    with rotation_in_own_dtype():
        yield


# Tokens of a block: within a page, of two pages, a chunk, more than a chunk at no page's border,
# several chunks, and more than the text.
@pytest.mark.parametrize("block", [5, 16, 23, 40, 64])
@pytest.mark.parametrize("tokens", [50, 51, 52])
def test_gradients_are_those_of_one_ordinary_backward(block: int, tokens: int) -> None:
    """Tails of one, two and three tokens: the last of the text is not run."""
    model, ids = make(block), random_ids(2, tokens)
    expected = ordinary(model, ids, ids)
    recompute = "layer" if tokens % 2 else "none"
    assert_equal(chunked(model, replace(CONFIG, recompute=recompute), ids, ids), expected)


# Lengths of documents in each sequence; chunks end at 16 and 32, blocks of 12 begin with documents.
PACKED = {
    "at a border": [[16, 32, 5]],
    "before a border": [[15, 17, 21]],
    "behind a border": [[17, 16, 20]],
    "at a block's border": [[12, 24, 17]],
    "of one token": [[1, 30, 1, 21]],
    "other ones in each sequence": [[20, 33], [3, 50]],
}


def one_by_one(model: Any, ids: torch.Tensor, lengths: list[list[int]]) -> Result:
    """Ordinary training on each document by itself."""
    total = sum(length - 1 for row in lengths for length in row)
    loss = torch.zeros((), dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {}
    for row, of_row in zip(ids, lengths, strict=True):
        for document in row[: sum(of_row)].split(of_row):
            if len(document) == 1:  # predicts nothing
                continue
            part = ordinary(model, document[None], document[None], num_items_in_batch=total)
            loss += part.loss
            for name, gradient in part.gradients.items():
                sums[name] = sums.get(name, 0) + gradient
    return Result(loss, sums)


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("spills", [False, True])
def test_blocks_begin_with_their_document(case: str, spills: bool) -> None:
    lengths = PACKED[case]
    model, ids = make(12), random_ids(len(lengths), 53)
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    documents = torch.stack(numbers)
    tiers = {**TIGHT, "recompute": "layer"} if spills else {}
    if spills and len(lengths) > 1:
        tiers["device_memory"] = 16 * PAGE_BYTES
    found = chunked(model, replace(CONFIG, **tiers), ids, ids, document_ids=documents)
    assert_equal(found, one_by_one(model, ids, lengths))
    assert found.step is not None
    assert (found.step.stats.h2d_bytes > 0) == spills


def test_padding() -> None:
    model, ids = make(12), random_ids(2, 53)
    lengths = [[53], [37]]
    mask = torch.ones_like(ids)
    mask[1, 37:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = chunked(model, CONFIG, ids, labels, attention_mask=mask)
    assert_equal(found, one_by_one(model, ids, lengths))


WAYS: dict[str, dict[str, Any]] = {
    "two tiers": TIGHT,
    "kept outputs": {"keep_outputs": "all"},
    "kept outputs, two tiers": {**TIGHT, "keep_outputs": 0.5, "host_memory": "4MiB"},
    "page lists of all pages": {"attention": oomb.TopKPages(budget=64)},
    "page lists of all pages, two tiers": {**TIGHT, "attention": oomb.TopKPages(budget=64)},
}


@pytest.mark.parametrize("way", WAYS)
def test_in_every_way_of_training(way: str) -> None:
    model, ids = make(23), random_ids(1, 91)
    expected = ordinary(model, ids, ids)
    assert_equal(chunked(model, replace(CONFIG, **WAYS[way]), ids, ids), expected)


def test_tiers_change_no_bit() -> None:
    model, ids = make(23, torch.float32), random_ids(1, 91)
    tight = {"device_memory": 5 * PAGE_BYTES, "host_memory": "1MiB"}
    found = chunked(model, replace(CONFIG, **tight), ids, ids)
    assert found.step is not None
    assert found.step.stats.h2d_bytes > 0
    assert_identical(found, chunked(model, CONFIG, ids, ids))


@pytest.mark.parametrize("layer", [1, 2])
def test_adapters_of_an_upper_layer_alone(layer: int) -> None:
    """On the projection that scales queries too."""
    settings = peft.LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj"], layers_to_transform=[layer], r=2
    )
    model = peft.get_peft_model(make(12), settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.2, generator=generator)
    ids = random_ids(1, 53)
    assert_equal(chunked(model, CONFIG, ids, ids), ordinary(model, ids, ids))


def test_rows_that_begin_alike() -> None:
    """Blocks and places are those of the rows."""
    model, ids = make(20), random_ids(1, 47).expand(2, -1).clone()
    ids[1, 35:] = random_ids(1, 12, seed=9)
    expected = ordinary(model, ids, ids)
    with (
        oomb.Engine(model, CONFIG) as engine,
        engine.two_pass(ids, ids, share_prefixes=True) as call,
    ):
        (-call.logprobs.sum() / (2 * 46)).backward()
        call.sweep()
    found = take_gradients(model)
    for parameter, gradient in expected.gradients.items():
        assert relative_error(found[parameter], gradient) <= EXACT, parameter


@pytest.mark.parametrize("images", [0, 2])
def test_the_class_of_checkpoints(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decoder is inside a causal model of its own; of two images one crosses a border."""
    model, ids = make_with_images(12), random_ids(1, 51)
    given = {}
    if images:
        ids[ids == IMAGE] = 1
        for begin in (6, 14):
            ids[:, begin : begin + PER_IMAGE] = IMAGE
        given["pixel_values"] = random_images(images)
    # Its own forward in transformers 5.24.0 ends by reading this of an output that lacks it.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    expected = ordinary(model, ids, ids, **given)
    assert ("vision_model.patch_embedding.linear.weight" in expected.gradients) == (images > 0)
    assert_equal(chunked(model, CONFIG, ids, ids, **given), expected)


def test_a_model_is_afterwards_as_it_was() -> None:
    model, ids = make(12), random_ids(1, 53)
    before = ordinary(model, ids, ids)
    chunked(model, CONFIG, ids, ids)
    grows = [layer.self_attn.attn_temperature_tuning for layer in model.model.layers]
    assert grows == [True] * 3
    assert not any("forward" in vars(layer.self_attn.q_proj) for layer in model.model.layers)
    assert_identical(ordinary(model, ids, ids), before)


def test_layers_of_blocks_read_pages_like_windows() -> None:
    """Plans, which see no mask, know it too."""
    model = make(16)
    with oomb.Engine(model, CONFIG) as engine:
        assert engine.layer_windows == [16, 0, 16]
        assert [shape.block for shape in engine._shapes] == [16, 0, 16]
        assert Planner(model, Machine.described(gpu="h200")).shapes == engine._shapes


def test_places_and_blocks_both_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without either the gradients are others by far: the tests above would see it."""
    model, ids = make(12), random_ids(1, 53)
    expected = ordinary(model, ids, ids)
    blind = call_pages.CallPages.first_key_of
    with monkeypatch.context() as patched:
        patched.setattr(
            call_pages.CallPages, "first_key_of", lambda self, chunk, _=0: blind(self, chunk)
        )
        assert worst_error(chunked(model, CONFIG, ids, ids), expected)[0] > 1e-3
    with monkeypatch.context() as patched:
        zeros = torch.zeros(1, 1, dtype=torch.int32)
        patched.setattr("oomb.core.loop.document_places", lambda *_: zeros.expand(1, 16))
        assert worst_error(chunked(model, CONFIG, ids, ids), expected)[0] > 1e-3


def seen(first: Any) -> int:
    """What is found of a mask whose rows see the keys from ``first(row)`` on."""

    def mask(_: Any, __: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= row) & (key >= first(row))

    return int(interface.window_of_mask(mask_function=mask))


def test_what_a_mask_shows() -> None:
    assert seen(lambda row: 0 * row) == 0
    assert seen(lambda row: row - 4095) == 4096
    assert seen(lambda row: row) == 1
    for size in (2, 7, 8, 8192, 100_000, 2**20 - 1, 2**20):
        assert seen(lambda row, size=size: row // size * size) == -size
    # Blocks that begin elsewhere, or become larger.
    assert seen(lambda row: (row + 3) // 8 * 8 - 3) == interface.UNKNOWN
    larger = seen(lambda row: torch.where(row < 4096, row // 8 * 8, row // 16 * 16))
    assert larger == interface.UNKNOWN
