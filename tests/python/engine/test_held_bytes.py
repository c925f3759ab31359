"""What a call holds for every token between its chunks, beside the pages; counted, to the byte."""

from __future__ import annotations

import pytest
import torch

import oomb
from oomb.trace.meter import Meter

from .models import make

CHUNK, PAGE, BUDGET = 16, 4, 3
SHORT, LONG = 10, 30  # chunks
TOKENS = (LONG - SHORT) * CHUNK
INPUTS = 4 + 4  # positions and targets, int32
LISTS = 3 * BUDGET * 4 / PAGE  # of three layers; in host memory, which a CPU's tensors are in too
MEANS = 3 * 2 * 8 * 4 / PAGE  # three layers, two heads of 8 values, fp32


def held(
    chunks: int, attention: oomb.Dense | oomb.TopKPages, *, evaluates: bool = False
) -> dict[tuple[str, int], int]:
    """Bytes of living tensors, by phase and number of chunks that it has left to do."""
    model = make("llama", torch.float32, max_position_embeddings=2048)
    ids = torch.randint(97, (1, chunks * CHUNK + 1))
    found: dict[tuple[str, int], int] = {}
    meter = Meter()

    def note(progress: oomb.Progress) -> None:
        left = progress.chunk
        if progress.phase == "fill":
            left = progress.num_chunks - 1 - progress.chunk
        found[progress.phase, left] = meter.live_bytes

    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, attention=attention)
    with oomb.Engine(model, config) as engine, meter:
        call = engine.evaluate if evaluates else engine.forward_backward
        call(ids, ids, on_progress=note)
    return found


@pytest.mark.parametrize(
    ("attention", "lists", "means"),
    [
        (oomb.Dense(), 0.0, 0.0),
        (oomb.TopKPages(budget=BUDGET), LISTS, MEANS),
        (oomb.TopKPages(budget=BUDGET, summary="bounds"), LISTS, 2 * MEANS),
    ],
    ids=["dense", "sparse", "bounds"],
)
def test_bytes_per_token(
    attention: oomb.Dense | oomb.TopKPages, lists: float, means: float
) -> None:
    """Summaries of pages until the sweep has begun; page lists once, where the host has them."""
    short, long = held(SHORT, attention), held(LONG, attention)
    filled = (long["fill", 0] - short["fill", 0]) / TOKENS
    assert filled == INPUTS + lists + means
    for left in range(SHORT - 1):
        swept = (long["sweep", left] - short["sweep", left]) / TOKENS
        assert swept == INPUTS + lists, left


@pytest.mark.parametrize(
    ("attention", "means"),
    [
        (oomb.Dense(), 0.0),
        (oomb.TopKPages(budget=BUDGET), MEANS),
        (oomb.TopKPages(budget=BUDGET, summary="bounds"), 2 * MEANS),
    ],
)
def test_bytes_per_token_of_evaluate(attention: oomb.Dense | oomb.TopKPages, means: float) -> None:
    """Nothing comes behind it that would read page lists again."""
    short, long = (held(chunks, attention, evaluates=True) for chunks in (SHORT, LONG))
    assert (long["fill", 0] - short["fill", 0]) / TOKENS == INPUTS + means
