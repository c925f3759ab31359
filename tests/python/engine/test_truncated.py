"""Truncated chunks: exact against one backward in which farther keys and values are constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb

from .models import make
from .reference import assert_equal, assert_identical, chunked, random_ids, relative_error
from .test_sparse import CHUNK, PAGE, RULES, TOKENS, run

CHUNKS = 5
SPILLED = {"device_memory": 12 * 2 * 2 * PAGE * 8 * 8, "host_memory": "1MiB"}
INPUTS = ["plain", "padded", "documents"]


def truncated(window: int, **settings: Any) -> dict[str, Any]:
    return {"backward": oomb.TruncatedChunks(window=window), **settings}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("window", range(CHUNKS))
def test_equals_constants_beyond_the_window(window: int, inputs: str) -> None:
    assert_equal(*run("llama", oomb.Dense(), inputs, **truncated(window))[:2])


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        SPILLED,
        {"recompute": "layer"},
        {"keep_outputs": "all"},
        {"deterministic": False, "keep_outputs": 0.5, **SPILLED},
    ],
    ids=["spilled", "recompute", "kept outputs", "no fixed order"],
)
def test_with_other_settings(settings: dict[str, Any], window: int) -> None:
    assert_equal(*run("llama", oomb.Dense(), "padded", **truncated(window, **settings))[:2])


@pytest.mark.parametrize("tiers", [{}, SPILLED], ids=["device", "spilled"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("rule", ["block mean", "token softmax per head", "sink and recent"])
def test_with_chosen_pages(rule: str, inputs: str, tiers: dict[str, Any]) -> None:
    """A page that is chosen from beyond the window is read, and gets no gradient."""
    result, expected, visible = run("llama", RULES[rule], inputs, **truncated(1, **tiers))
    assert any(lists is not None for layer in visible.selection for lists in layer)
    assert_equal(result, expected)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "mistral", "phi3", "gpt-oss"])
def test_architectures(name: str) -> None:
    """Windows of attention and of gradient do not know of each other."""
    assert_equal(*run(name, oomb.Dense(), **truncated(1))[:2])


def test_a_window_of_all_chunks_is_exact_training() -> None:
    model, ids = make("llama"), random_ids(2, TOKENS)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE}
    exact = chunked(model, oomb.Config(**settings), ids, ids)
    for window in (CHUNKS - 1, CHUNKS + 7):
        one = chunked(model, oomb.Config(**settings, **truncated(window)), ids, ids)
        assert_identical(one, exact)
    short = chunked(model, oomb.Config(**settings, **truncated(CHUNKS - 2)), ids, ids)
    errors = [relative_error(short.gradients[k], g) for k, g in exact.gradients.items()]
    assert max(errors) > 1e-6


@pytest.mark.parametrize("window", [0, 1, 2, 7])
def test_so_many_chunks_have_gradient_pages(window: int) -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    in_use: dict[int, int] = {}

    def note(progress: oomb.Progress) -> None:
        if progress.phase == "sweep":
            in_use[progress.chunk] = progress.device_bytes

    settings = {"chunk_size": CHUNK, "page_size": PAGE, "keep_outputs": "none"}
    config = oomb.Config(**settings, **truncated(window))
    chunked(model, config, ids, ids, on_progress=note)
    shapes = model.config
    head_dim = shapes.hidden_size // shapes.num_attention_heads
    of_chunk = CHUNK * 2 * shapes.num_key_value_heads * head_dim * 4 * shapes.num_hidden_layers
    assert in_use == {c: of_chunk * (max(0, c - 1) + min(window, c)) for c in range(CHUNKS)}


@pytest.mark.parametrize("window", [-1, 1.5, True, None])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match=r"^window: expected an int >= 0, got"):
        oomb.TruncatedChunks(window=window)
