"""Which settings a plan takes, of predictions that are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import oomb
from oomb.plan.choosing import fastest, in_longer_chunks

Seconds = dict[tuple[int, str], float]


def made(chunk: int, recompute: str, seconds: float | None) -> Any:
    config = oomb.Config(chunk_size=chunk, recompute=recompute)  # type: ignore[arg-type]
    return SimpleNamespace(
        config=config, seconds=seconds, fits=seconds is not None, num_tokens=2**20
    )


def predicted_of(fitting: Seconds) -> Callable[[oomb.Config], Any]:
    """Seconds of what fits; nothing else does."""

    def predicted(config: oomb.Config) -> Any:
        kind = config.chunk_size, config.recompute
        return made(*kind, fitting.get(kind))

    return predicted


# Chunk and recompute that fit beside 2,048 tokens in 10 s, with seconds; what is chosen.
_LONGER: dict[str, tuple[str, dict[tuple[int, str], float], bool, tuple[int, str]]] = {
    "layers that are recomputed": (
        "none",
        {(4096, "layer"): 12.0, (8192, "layer"): 6.0},
        True,
        (8192, "layer"),
    ),
    "recompute was said": ("none", {(4096, "layer"): 5.0}, False, (2048, "none")),
    "kept ones are faster": (
        "none",
        {(4096, "none"): 4.0, (4096, "layer"): 5.0, (8192, "layer"): 4.5},
        True,
        (4096, "none"),
    ),
    "recomputed from the first": (
        "layer",
        {(4096, "none"): 1.0, (4096, "layer"): 8.0},
        True,
        (4096, "layer"),
    ),
    "too long for a rank": ("none", {(16384, "layer"): 1.0}, True, (2048, "none")),
}


@pytest.mark.parametrize("name", _LONGER)
def test_a_longer_chunk_may_recompute_layers(name: str) -> None:
    recompute, fitting, may_recompute, expected = _LONGER[name]
    found = fastest(made(2048, recompute, 10.0), 4, predicted_of(fitting), may_recompute)
    assert (found.config.chunk_size, found.config.recompute) == expected


def table(recompute: str, **seconds: float) -> Seconds:
    return {(int(name[1:]), recompute): value for name, value in seconds.items()}


# A short chunk that waits for what comes with each: what fits, what is taken, its seconds for 10.
_SHORT: dict[str, tuple[Seconds, tuple[int, str], float]] = {
    "layers again are faster": (
        table("pointwise", _1024=8.0) | table("layer", _1024=7.0, _2048=6.0, _4096=5.0),
        (4096, "layer"),
        5.0,
    ),
    "not the longest": (table("layer", _1024=5.0, _2048=4.0), (2048, "layer"), 4.0),
    "less again is faster": (
        table("pointwise", _1024=5.0, _2048=4.0) | table("layer", _1024=7.0, _2048=6.0, _4096=5.0),
        (2048, "pointwise"),
        4.0,
    ),
    "no longer one fits": ({}, (512, "none"), 10.0),
    "longer ones are slower": (table("layer", _1024=12.0, _2048=11.0), (512, "none"), 10.0),
    "hardly faster": (table("layer", _1024=9.9), (512, "none"), 10.0),
}


@pytest.mark.parametrize("name", _SHORT)
def test_a_short_chunk_may_become_longer(name: str) -> None:
    fitting, expected, seconds = _SHORT[name]
    own = oomb.Config(chunk_size=512, recompute="none")
    predicted = predicted_of(fitting | {(512, "none"): 10.0})
    found, share = in_longer_chunks(own, 2**17, predicted)
    assert (found.chunk_size, found.recompute) == expected
    assert share == seconds / 10.0


def test_what_is_long_asks_for_no_prediction() -> None:
    def predicted(config: oomb.Config) -> Any:
        raise AssertionError("a prediction takes seconds")

    own = oomb.Config(chunk_size=4096, recompute="none")
    assert in_longer_chunks(own, 2**17, predicted) == (own, 1.0)
