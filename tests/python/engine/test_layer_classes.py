"""Layers of other heads and head dims in one pool, and layers that read another one's pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from oomb.core.tiers import PageLayout
from oomb.model.layer_shape import LayerShape

from .layer_classes import CLASSES, make, only_upper_half
from .reference import (
    EXACT,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
)
from .test_sparse import PAGE, run

CONFIG = oomb.Config(chunk_size=16, page_size=8, recompute="none")
SHARED = ["gemma4-e2b", "gemma3n"]


def shapes_of(model: PreTrainedModel) -> list[LayerShape]:
    with oomb.Engine(model, CONFIG) as engine:
        return engine._shapes


def spilled(model: PreTrainedModel, slots: int = 10) -> dict[str, Any]:
    """A device tier of so many slots, for pages of ``PAGE`` tokens in fp64."""
    rows = [shape.kv_heads * shape.head_dim for shape in shapes_of(model)]
    return {"device_memory": slots * 2 * 8 * PAGE * max(rows), "host_memory": "1MiB"}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("tokens", [49, 50, 51, 52])
@pytest.mark.sampled(10)
def test_gradients_are_those_of_one_ordinary_backward(name: str, tokens: int) -> None:
    """Tails of none to three tokens, as the last of the text is not run; a batch."""
    model, ids = make(name), random_ids(2, tokens)
    expected = ordinary(model, ids, ids)
    recompute = "layer" if tokens % 2 else "none"
    assert_equal(chunked(model, replace(CONFIG, recompute=recompute), ids, ids), expected)


# name: rule of attention, inputs, settings, whether pages spill
WAYS: dict[str, tuple[oomb.Dense | oomb.PageRule, str, dict[str, Any], bool]] = {
    "documents": (oomb.Dense(), "documents", {}, False),
    "documents, spilled": (oomb.Dense(), "documents", {"recompute": "layer"}, True),
    "padding, spilled": (oomb.Dense(), "padded", {}, True),
    "kept outputs": (oomb.Dense(), "padded", {"keep_outputs": "all"}, False),
    "kept outputs, spilled": (oomb.Dense(), "plain", {"keep_outputs": 0.5}, True),
    "truncated": (oomb.Dense(), "plain", {"backward": oomb.TruncatedChunks(window=1)}, False),
    "truncated, spilled": (
        oomb.Dense(),
        "padded",
        {"backward": oomb.TruncatedChunks(window=2), "recompute": "layer"},
        True,
    ),
    "sparse": (oomb.TopKPages(budget=3), "documents", {"recompute": "layer"}, False),
    "sparse, spilled": (oomb.TopKPages(budget=3), "padded", {"keep_outputs": "all"}, True),
    "sparse, truncated": (
        oomb.TopKPages(budget=2, share="kv_head", score="token_softmax"),
        "plain",
        {"backward": oomb.TruncatedChunks(window=1)},
        True,
    ),
}


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-e2b"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(8)
def test_in_every_way_of_training(way: str, name: str) -> None:
    rule, inputs, settings, spills = WAYS[way]
    model = make(name)
    tiers = spilled(model, 24 if inputs == "padded" else 16) if spills else {}
    result, expected, visible = run(model, rule, inputs, **settings, **tiers)
    chosen = any(lists is not None for layer in visible.selection for lists in layer)
    assert chosen == isinstance(rule, oomb.PageRule)
    assert result.step is not None
    assert (result.step.stats.h2d_bytes > 0) == spills
    assert_equal(result, expected)


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-e2b"])
def test_rows_that_begin_alike(name: str) -> None:
    """Branches of a prompt begin at pages of every layer."""
    model, ids = make(name), random_ids(1, 47).expand(2, -1).clone()
    ids[1, 35:] = random_ids(1, 12, seed=9)
    expected = ordinary(model, ids, ids)
    with (
        oomb.Engine(model, CONFIG) as engine,
        engine.two_pass(ids, ids, share_prefixes=True) as call,
    ):
        (-call.logprobs.sum() / (2 * 46)).backward()
        call.sweep()
    found = take_gradients(model)
    assert found.keys() == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():
        assert relative_error(found[parameter], gradient) <= EXACT, parameter


@pytest.mark.parametrize("name", SHARED)
def test_weights_of_upper_layers_alone(name: str) -> None:
    """Readers get gradient, and the layers whose keys and values they read need none."""
    model, ids = make(name), random_ids(1, 60)
    only_upper_half(model)
    expected = ordinary(model, ids, ids)
    assert_equal(chunked(model, CONFIG, ids, ids), expected)


@pytest.mark.parametrize("window", [1, 2])
def test_frozen_layers_that_are_read_give_back_the_pages_of_truncated_gradients(
    window: int,
) -> None:
    """They have no backward, which would end a chunk's; pools of two chunks' must be enough."""
    model, ids = make("gemma4-e2b"), random_ids(1, 16 * 12 + 3)
    only_upper_half(model)
    config = replace(CONFIG, backward=oomb.TruncatedChunks(window=window), keep_outputs="none")
    found = take_gradients_of(model, config, ids)
    tiers = {"device_memory": "1MiB", "host_memory": "1MiB"}
    expected = take_gradients_of(model, replace(config, **tiers, recompute="layer"), ids)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter


def take_gradients_of(
    model: PreTrainedModel, config: oomb.Config, ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids, ids)
    return take_gradients(model)


@pytest.mark.parametrize("name", ["gemma4-26b-a4b", "gemma4-e2b"])
def test_tiers_change_no_bit(name: str) -> None:
    model, ids = make(name, torch.float32), random_ids(1, 90)
    config = replace(CONFIG, page_size=PAGE)
    whole = chunked(model, config, ids, ids)
    tight = chunked(model, replace(config, **spilled(model, 8)), ids, ids)
    assert tight.step is not None
    assert tight.step.stats.h2d_bytes > 0
    assert_identical(tight, whole)


def test_readers_have_no_pages_and_the_fill_ends_at_the_last_that_stores() -> None:
    """Seven layers of which three store: the tiers hold three, and four never run in the fill."""
    model, ids = make("gemma4-e2b"), random_ids(1, 65)
    assert [shape.source for shape in shapes_of(model)] == [None, None, None, 2, 1, 2, 1]
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    with oomb.Engine(model, CONFIG) as engine:
        ran.clear()
        step = engine.forward_backward(ids, ids)
        # Of the fill's chunks all but the last; K and V of the third layer are all that it needs.
        assert ran[: 3 * 2] == [0, 1] * 3
        plan = engine.plan(65)
    filled = 3 * 16  # tokens: those of the last chunk are not kept
    row = 2 * 8  # K and V, fp64
    pages = filled * row * (8 + 16 + 8)
    assert step.stats.device_peak_bytes >= 2 * pages
    assert step.stats.device_peak_bytes <= -(-2 * pages // 2**16) * 2**16
    assert plan.device_bytes >= 2 * pages


# Heads of two classes of layers (heads x head dim), tokens of a page and chunk, with which pages.
PAGES = {
    "global layers of the 31B": ((16 * 256, 4 * 512), 128, 4096, (64, 128)),
    "of the E2B": ((256, 512), 128, 4096, (128, 64)),
    "of the E2B, smaller pages": ((256, 512), 64, 4096, (64, 64)),
    "no whole tokens": ((24, 32), 8, 16, (8, 8)),
    "no whole pages in a chunk": ((8, 16), 9, 9, (9, 9)),
}


@pytest.mark.parametrize("case", PAGES)
def test_pages_of_every_class_fill_a_slot_where_kernels_take_them(case: str) -> None:
    (sliding, whole), page_size, chunk_size, expected = PAGES[case]
    shapes = [LayerShape(4, 1, sliding, 512), LayerShape(4, 1, whole, 0)]
    layout = PageLayout.of_layers(
        shapes, page_size, chunk_size, torch.bfloat16, "float32", chooses=False
    )
    assert layout.page_sizes == expected
    rows = max(p * row for p, row in zip(expected, (sliding, whole), strict=True))
    assert layout.slot_bytes == 2 * 2 * rows


def test_a_page_rule_chooses_pages_of_the_size_that_was_asked_for() -> None:
    shapes = [LayerShape(4, 1, 256, 512), LayerShape(4, 1, 512, 0)]
    layout = PageLayout.of_layers(shapes, 64, 4096, torch.bfloat16, "float32", chooses=True)
    assert layout.page_sizes == (128, 64)


def test_a_page_rule_wants_layers_that_choose_alike() -> None:
    shapes = [LayerShape(4, 1, 8, 0), LayerShape(4, 2, 8, 0)]
    with pytest.raises(oomb.UnsupportedModelError, match=r"choose pages.*\(1, 8\), \(2, 8\)"):
        PageLayout.of_layers(shapes, 8, 16, torch.float32, "float32", chooses=True)
