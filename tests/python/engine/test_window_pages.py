"""Layers with a sliding window keep the pages that a later chunk sees, and nothing changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import oomb
from oomb.core import page_demand
from oomb.core.layout import Chunks, GradientReach
from oomb.core.page_demand import PageDemand
from oomb.core.tiers import PageLayout
from oomb.core.tree import TreeChunks
from oomb.core.window_pages import existing_pages
from oomb.model.layer_shape import LayerShape
from oomb.plan.pages import PageCall
from oomb.plan.pools import slots_at_once

from .models import make
from .reference import assert_equal, assert_identical, chunked, ordinary, random_ids
from .tiers import slot_bytes

CHUNK, PAGE, TOKENS = 16, 8, 75


@dataclass(frozen=True)
class Case:
    """A window in tokens, and how a call is made; ``slots`` of its device tier, None: all."""

    window: int
    inputs: str = "plain"
    slots: int | None = None
    model: str = "mistral"
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def batch(self) -> int:
        return 3 if self.inputs == "padded" else 1


SPARSE = {"attention": oomb.TopKPages(budget=2)}
CASES = {
    # One token; less than a page; a page, and one more or less; not a multiple of pages; a chunk,
    # and one more or less; several chunks; more than the sequence.
    **{f"{w} tokens": Case(w) for w in (1, 2, 5, 8, 9, 10, 16, 17, 18, 40, 500)},
    **{f"{w} tokens, spilled": Case(w, slots=6, model="gpt-oss") for w in (1, 3, 9, 17, 40)},
    "documents": Case(7, "documents"),
    "documents, spilled": Case(20, "documents", 5, settings={"recompute": "layer"}),
    "rows of unlike length": Case(6, "padded"),
    "rows of unlike length, spilled": Case(11, "padded", 9, settings={"keep_outputs": "all"}),
    "kept outputs": Case(5, slots=8, settings={"keep_outputs": "all"}),
    "sampled": Case(4, slots=6, settings={"backward": oomb.SampledChunks(keep=0.5, seed=3)}),
    "sampled, wide": Case(30, settings={"backward": oomb.SampledChunks(keep=0.5, seed=5)}),
    "truncated": Case(30, slots=6, settings={"backward": oomb.TruncatedChunks(window=1)}),
    "page lists beside it": Case(9, slots=8, model="gpt-oss", settings=SPARSE),
    "pages of a token": Case(3, settings={"page_size": 1}),
    "a page a chunk": Case(9, slots=5, settings={"page_size": 16}),
    "bf16": Case(
        5,
        slots=8,
        settings={"kv_grad_dtype": "bfloat16", "recompute": "none"},
        dtype=torch.bfloat16,
    ),
}


def inputs_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    ids = random_ids(case.batch, TOKENS)
    if case.inputs == "documents":
        return ids, ids, {"document_ids": torch.tensor([0] * 21 + [1] * 1 + [2] * 53)[None]}
    if case.inputs == "padded":
        mask = torch.arange(TOKENS)[None] < torch.tensor([TOKENS, 33, 9])[:, None]
        return ids, ids.masked_fill(~mask, -100), {"attention_mask": mask.long()}
    return ids, ids, {}


@pytest.mark.parametrize("name", CASES)
def test_pages_that_nobody_reads_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    model = make(case.model, case.dtype, sliding_window=case.window)
    ids, labels, arguments = inputs_of(case)
    config = oomb.Config(**{"chunk_size": CHUNK, "page_size": PAGE, **case.settings})
    tiers: dict[str, Any] = {}
    if case.slots is not None:
        memory = case.slots * slot_bytes(model, config)
        tiers = {"device_memory": memory, "host_memory": "64MiB"}
    config = oomb.Config(**{"chunk_size": CHUNK, "page_size": PAGE, **case.settings, **tiers})
    found = chunked(model, config, ids, labels, **arguments)
    monkeypatch.setattr(Chunks, "pages_within", lambda self, chunk, window: self.pages(chunk))
    every_page = chunked(model, config, ids, labels, **arguments)
    assert_identical(found, every_page)


@pytest.mark.parametrize("window", [1, 3, 8, 9, 17, 40])
def test_gradients_are_those_of_one_ordinary_backward(window: int) -> None:
    model, ids = make("gpt-oss", sliding_window=window), random_ids(2, TOKENS - window % 3)
    tiers = {"device_memory": 6 * 2 * 2 * PAGE * 8 * 8, "host_memory": "64MiB"}
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, **tiers)
    assert_equal(chunked(model, config, ids, ids), ordinary(model, ids, ids))


def test_evaluation_reads_what_is_there() -> None:
    model, ids = make("mistral", sliding_window=5), random_ids(2, TOKENS)
    expected = ordinary(model, ids, ids)
    with oomb.Engine(model, oomb.Config(chunk_size=CHUNK, page_size=PAGE)) as engine:
        loss = engine.evaluate(ids, ids).loss
        assert torch.allclose(loss.double(), expected.loss, rtol=1e-12, atol=0)


def seen_pages(chunks: Chunks, window: int, filled: int) -> set[int]:
    """By definition: pages with a key that some row of a later chunk sees."""
    seen = set()
    for chunk in range(1, chunks.number):
        keys = [
            page
            for first, last in chunks.past(chunk)
            for page in range(first, last)
            for _ in range(chunks.page_size)
        ]
        begin, end = chunks.span(chunk)
        for row in range(len(keys), len(keys) + end - begin):
            for key in range(max(0, row - window + 1), min(row + 1, len(keys))):
                seen.add(keys[key])
    return {page for page in seen if page < chunks.first_page(filled)}


def test_a_page_exists_if_some_later_row_sees_one_of_its_keys() -> None:
    for page_size, pages, tokens in ((1, 3, 20), (4, 1, 31), (4, 3, 50), (8, 4, 129)):
        plain = Chunks(tokens, page_size * pages, page_size)
        # A prompt, and branches of it that begin where they part.
        stretches = [(-1, 5 * page_size), (0, 4 * page_size), (1, 7), (1, 3), (0, tokens)]
        tree = TreeChunks.of_stretches(stretches, page_size * pages, page_size, page_size)
        for window in (1, 2, page_size, page_size + 1, 3 * page_size + 2, tokens * 2):
            for chunks, filled in ((plain, plain.number - 1), (tree, tree.number)):
                exist = existing_pages(chunks, window, filled)
                found = {int(page) for page in exist.nonzero()[0]}
                assert found == seen_pages(chunks, window, filled), (chunks, window)


def call_of(
    windows: list[int],
    chunks: Chunks,
    reach: GradientReach | None,
    grad: str = "float32",
    sources: tuple[int | None, ...] = (),
) -> PageDemand:
    shapes = [
        LayerShape(query_heads=32, kv_heads=16, head_dim=128, window=window, source=source)
        for window, source in zip(windows, sources or (None,) * len(windows), strict=True)
    ]
    layout = PageLayout.of(16, 128, chunks.page_size, torch.bfloat16, grad)
    kind: Any = PageDemand if reach is None else PageCall
    demand: PageDemand = kind(
        chunks=chunks,
        reach=reach,
        shapes=shapes,
        layout=layout,
        batch=1,
        device_type="cuda",
        selection=None,
    )
    return demand


def test_gemma_3_27b_keeps_184_kib_per_token() -> None:
    """62 layers of 8 KiB per token, every sixth global; the window of the others is 1024 tokens,
    a quarter of a chunk: 10 x 8 + 52 x 8 / 4."""
    windows = [0 if layer % 6 == 5 else 1024 for layer in range(62)]

    def bytes_of(chunks: int, swept: bool) -> int:
        cut = Chunks(4096 * chunks, 4096, 128)
        reach = GradientReach(range(chunks), None) if swept else None
        demand = call_of(windows, cut, reach)
        return demand.page_slots * demand.layout.slot_bytes

    kib = 1024 * 4096
    assert bytes_of(21, False) - bytes_of(20, False) == 184 * kib
    # Gradients in fp32, of the global layers alone: in a window their number does not grow.
    assert bytes_of(21, True) - bytes_of(20, True) == (184 + 2 * 10 * 8) * kib


def test_tiers_are_sized_for_what_a_call_has_at_once() -> None:
    """What is asked for is never less than the peak, and mostly that."""
    draw, exact = random.Random(3), 0
    for _ in range(300):
        pages, number = draw.randint(1, 4), draw.randint(1, 7)
        chunks = Chunks(draw.randint(1, 8 * pages * number), 8 * pages, 8)
        layers = draw.randint(1, 4)
        windows = [draw.choice((0, 1, 5, 9, 20, 33, 70)) for _ in range(layers)]
        swept = [c for c in range(chunks.number) if draw.random() < 0.7] or [chunks.number - 1]
        cut = draw.choice((None, None, 0, 1, 2))
        if cut is not None:
            swept = list(range(chunks.number))
        shared: tuple[int | None, ...] = ()
        if layers > 2 and draw.random() < 0.4:
            shared = (*(None,) * (layers - 1), draw.randrange(layers - 1))
        reach = GradientReach(swept, cut)
        call = call_of(windows, chunks, reach, draw.choice(("float32", "bfloat16")), shared)
        assert isinstance(call, PageCall)
        peak = slots_at_once(call)
        assert peak <= call.page_slots, (windows, chunks, reach, shared)
        exact += peak == call.page_slots
    assert exact > 60


def test_pages_of_very_long_texts_are_bounded_instead_of_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(4)
    for _ in range(100):
        pages, number = draw.randint(1, 4), draw.randint(1, 7)
        chunks = Chunks(draw.randint(1, 8 * pages * number), 8 * pages, 8)
        windows = [draw.choice((0, 1, 5, 9, 20, 33, 70)) for _ in range(3)]
        swept = [c for c in range(chunks.number) if draw.random() < 0.7] or [chunks.number - 1]
        slots = []
        for counted in (2**16, 0):
            monkeypatch.setattr(page_demand, "_COUNTED_CHUNKS", counted)
            slots.append(call_of(windows, chunks, GradientReach(swept, None)).page_slots)
        assert slots[0] <= slots[1]


def test_a_plan_of_any_length_takes_no_time() -> None:
    with oomb.Engine(make("gpt-oss", sliding_window=5)) as engine:
        assert not engine.plan(10**12).fits
