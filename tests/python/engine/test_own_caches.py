"""Layers whose part of a cache is of a class of their own are named when they cannot be trained."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import oomb

from .models import make
from .reference import assert_equal, chunked, ordinary, random_ids

CONFIG = oomb.Config(chunk_size=16, page_size=8)


def asking(*, needs_it: bool) -> Any:
    """Llama with a layer that asks its part of the cache for what it has compressed.

    Args:
        needs_it: without a cache it puts compressed keys under a mask of its own.
    """
    model = make("llama")
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        cache = keywords.get("cache", keywords.get("past_key_values"))
        if cache is not None:
            cache.layers[1].compressed("keys")
        elif needs_it:
            tokens = args[0].shape[1] if args else keywords["hidden_states"].shape[1]
            keywords["attention_mask"] = torch.zeros(1, 1, tokens, tokens)
        return inner(*args, **keywords)

    attention.forward = forward
    return model


def test_who_asks_is_named() -> None:
    with pytest.raises(
        oomb.UnsupportedModelError,
        match=r"layers\.1\.self_attn \(LlamaAttention\): asks its cache for a state of its own "
        r"kind \(compressed\), which chunks do not carry",
    ):
        oomb.Engine(asking(needs_it=True), CONFIG)


def test_a_layer_that_does_as_well_without_is_exact() -> None:
    model, ids = asking(needs_it=False), random_ids(1, 50)
    assert_equal(chunked(model, CONFIG, ids, ids), ordinary(model, ids, ids))


def test_a_decoder_may_ask_before_its_layers() -> None:
    """Then its layers still tell which states they have."""
    model = make("llama")
    decoder: Any = model.model
    inner, given = decoder.forward, []

    def forward(*args: Any, **keywords: Any) -> Any:
        cache = keywords.get("cache", keywords.get("past_key_values"))
        if cache is not None and cache.layers is not None:
            part = cache.layers[1]
            given.append(part.positions)
            part.positions = keywords["position_ids"]
        return inner(*args, **keywords)

    decoder.forward = forward
    oomb.Engine(model, CONFIG).close()
    assert given == [None]


def test_a_model_is_freed_with_its_last_name() -> None:
    """Not by a collector, which may come late: its weights fill a GPU."""
    model: Any = make("llama")
    seen = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        oomb.Engine(model, CONFIG).close()
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_a_part_of_the_parts_is_none() -> None:
    model: Any = make("llama")
    decoder, found = model.model, []
    inner = decoder.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        cache = keywords.get("cache", keywords.get("past_key_values"))
        if cache is not None and cache.layers is not None:
            found.append(cache.layers[0:2] * 2)
        return inner(*args, **keywords)

    decoder.forward = forward
    oomb.Engine(model, CONFIG).close()
    assert found == [[]]
