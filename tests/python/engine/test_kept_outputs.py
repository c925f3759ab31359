"""What the fill keeps of attention the sweep does not compute again; nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import oomb
from oomb import _C
from oomb.core.call_pages import CallPages
from oomb.core.keeping import Keeping
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import READ, READ_OUTPUT, Chunks, PagedLayers, call_order
from oomb.core.tiers import PageLayout
from oomb.model.layer_shape import LayerShape

from . import recovery
from .models import make
from .reference import assert_identical, chunked, random_ids
from .tiers import slot_bytes, with_slots

LAYERS, CHUNKS = 3, 8
PARTS = 2
SLOW_PARTS = [pytest.param(part, marks=[pytest.mark.slow, pytest.mark.release]) for part in (1, 2)]
SETTINGS: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
DENSE = LayerShape(query_heads=6, kv_heads=2, head_dim=8, window=0)
WINDOWED = LayerShape(query_heads=6, kv_heads=2, head_dim=8, window=12)


def keeping(
    shapes: list[LayerShape], swept: list[int], budget: int | None = None, chunks: int = CHUNKS
) -> Keeping:
    cut = Chunks(tokens=16 * chunks - 5, chunk_size=16, page_size=8)
    layout = PageLayout.of(2, 8, 8, torch.float32, "float32")
    return Keeping.of(KeptOutputs.none(cut, layout, shapes, 1), cut, shapes, swept, 1, budget)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize(("keep", "kept"), [("none", 0), (0.5, 7), ("all", 14)])
def test_the_sweep_computes_no_kept_output_again(
    keep: str | float, kept: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every filled chunk and layer but the last layer is computed once instead of twice."""
    calls = Counter[int]()
    forward = _C.attention_forward

    def counted(**arguments: Any) -> None:
        calls[arguments["past"].num_tokens] += 1
        forward(**arguments)

    model, ids = make("llama", torch.float32), random_ids(1, 16 * CHUNKS)
    config = oomb.Config(**SETTINGS, keep_outputs=keep, recompute=recompute)
    with oomb.Engine(model, config) as engine:
        monkeypatch.setattr(_C, "attention_forward", counted)
        step = engine.forward_backward(ids, ids)
    filled = (CHUNKS - 1) * (LAYERS - 1)
    assert calls.total() == filled + CHUNKS * LAYERS - kept
    assert step.stats.kept_output_share == kept / filled
    assert (step.stats.kept_output_seconds > 0) == (kept > 0)
    of_chunk = 16 * 6 * (8 * 4 + 4)  # o and log-sum-exp; a page holds 2 x 2 x 8 x 8 values
    slots = -(-16 * 6 * 8 * 4 // 1024) + -(-16 * 6 * 4 // 1024)
    assert slots * 1024 >= of_chunk
    assert step.stats.kept_output_bytes == kept * slots * 1024


def test_the_order_reads_an_output_instead_of_the_past() -> None:
    every = keeping([DENSE] * LAYERS, list(range(CHUNKS)))
    outputs = every.share(0.5)
    chunks = Chunks(tokens=16 * CHUNKS - 5, chunk_size=16, page_size=8)
    swept = list(range(CHUNKS))
    order = call_order(
        PagedLayers.alike(chunks, [0] * LAYERS),
        CHUNKS - 1,
        swept,
        whole_fill=False,
        output_span=outputs.span,
    )
    for chunk in range(CHUNKS):
        for layer in range(LAYERS):
            kind = order.visits[order.read[chunk, layer], 1]
            assert kind == (READ_OUTPUT if outputs.kept[chunk, layer] else READ)
    for layer in range(LAYERS):  # pieces of a layer lie side by side, each read once
        reads = order.visits[(order.visits[:, 0] == layer) & (order.visits[:, 1] == READ_OUTPUT)]
        pieces = sorted(piece for row in reads for piece in range(row[2], row[3]))
        assert pieces == list(range(len(pieces)))
        assert len(pieces) <= outputs.pieces_of_layer


def test_the_last_layer_and_the_last_chunk_are_not_kept() -> None:
    kept = keeping([DENSE] * LAYERS, [1, 3, 6]).share(1.0).kept
    expected = np.zeros((CHUNKS, LAYERS), dtype=bool)
    expected[[1, 3], : LAYERS - 1] = True
    assert np.array_equal(kept, expected)


def test_later_chunks_come_first_where_they_see_more() -> None:
    order = keeping([DENSE, WINDOWED, DENSE], list(range(CHUNKS))).order
    dense = [chunk for chunk, layer in order if layer == 0]
    assert dense == sorted(dense, reverse=True)
    # What a window sees does not grow: the first chunk of all but 0 is worth as much as the last.
    position = {place: index for index, place in enumerate(order)}
    assert position[1, 0] < position[6, 1]


def test_a_budget_bounds_what_an_output_is_worth() -> None:
    every = keeping([DENSE] * 2, list(range(CHUNKS)), budget=32)
    worth = dict(zip(every.order, every.worth, strict=True))
    assert worth[6, 0] == worth[2, 0] > worth[1, 0] > worth[0, 0]


def test_auto_keeps_what_fits_and_pays() -> None:
    every = keeping([DENSE] * LAYERS, list(range(40)), chunks=40)
    each = every.none.slots_of(0)
    worth = every.worth

    class TwoTrips:
        def least_worth(self, chunk: int, layer: int, flops: float, num_bytes: int) -> float:
            return 40.0

        def least_worth_of_mlp(self, *_: Any) -> float:
            raise AssertionError("there are none")

    on_device = every.worthwhile(10**6, 10**6, "cpu", TwoTrips())
    assert on_device.kept.sum() == sum(one >= 40 for one in worth) > 0
    over_link = every.worthwhile(-1, 10**6, "cpu", TwoTrips())
    assert over_link.kept.sum() == sum(one >= 80 for one in worth) > 0
    assert every.worthwhile(3 * each, 3 * each + 1, "cpu", TwoTrips()).kept.sum() == 3
    assert every.worthwhile(-1, 0, "cpu", TwoTrips()).slots == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("window", [DENSE, WINDOWED], ids=["dense", "windowed"])
def test_what_cannot_pay_is_known_before(device: str, window: Any) -> None:
    """With all the room there could be nothing is kept, or something, as it says."""
    paying = []
    for chunks in (2, 4, 8, 16, 32, 64):
        every = keeping([window] * LAYERS, list(range(chunks)), chunks=chunks)
        kept = every.worthwhile(10**9, 10**9, device, NoLink())
        assert every.pays(device) == (kept.slots > 0)
        paying.append(every.pays(device))
    assert paying == sorted(paying)
    if device == "cpu" and window is DENSE:
        assert set(paying) == {False, True}


class NoLink:
    def least_worth(self, *_: Any) -> float:
        raise AssertionError("all fits the device")

    def least_worth_of_mlp(self, *_: Any) -> float:
        raise AssertionError("there are none")


@pytest.mark.parametrize("attention", [oomb.Dense(), oomb.TopKPages(budget=3)])
def test_the_largest_share_that_fits_is_named(attention: oomb.Dense | oomb.TopKPages) -> None:
    """Before the first chunk; and it fits."""
    model, ids = make("llama", torch.float32), random_ids(2, 120)
    settings = {**SETTINGS, "attention": attention}
    expected = with_slots(model, settings, None, ids, ids)
    page = slot_bytes(model, oomb.Config(**settings))
    memory: dict[str, Any] = {"device_memory": 40 * page, "host_memory": 200 * page}
    seen: list[object] = []
    with pytest.raises(oomb.OutOfMemoryError, match=r"keep_outputs: .* host_memory") as caught:
        chunked(
            model,
            oomb.Config(**settings, **memory, keep_outputs="all"),
            ids,
            ids,
            on_progress=seen.append,
        )
    assert not seen
    share = float(str(caught.value).split("keep_outputs=")[1].split(";")[0])
    assert 0 < share < 1
    config = oomb.Config(**settings, **memory, keep_outputs=share)
    assert_identical(chunked(model, config, ids, ids), expected)
    with pytest.raises(oomb.OutOfMemoryError, match="keep_outputs: "):
        chunked(model, oomb.Config(**settings, **memory, keep_outputs=share + 0.1), ids, ids)


def test_an_error_in_the_sweep_leaves_nothing_kept() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, 120)
    settings: dict[str, Any] = {**SETTINGS, "keep_outputs": "all"}
    expected = with_slots(model, SETTINGS, None, ids, ids)
    page = slot_bytes(model, oomb.Config(**SETTINGS))
    config = oomb.Config(**settings, device_memory=20 * page, host_memory="16MiB")

    def stop(progress: oomb.Progress) -> None:
        if progress.phase == "sweep" and progress.chunk == 5:
            raise KeyboardInterrupt

    with oomb.Engine(model, config) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(ids, ids, on_progress=stop)
        assert all(p.grad is None for p in model.parameters())
        assert engine.snapshot()["host"]["taken_slots"] == 0
        engine.forward_backward(ids, ids)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name])


def test_a_plan_counts_what_is_kept() -> None:
    model, ids = make("llama", torch.float32), random_ids(2, 16 * CHUNKS)
    plans = {}
    for keep in ("none", 0.5, "all"):
        with oomb.Engine(model, oomb.Config(**SETTINGS, keep_outputs=keep)) as engine:
            plan = engine.plan(16 * CHUNKS, 2)
            plans[keep] = plan.device_bytes + plan.host_bytes
            kept = engine.forward_backward(ids, ids).stats.kept_output_bytes
            assert plans[keep] - plans["none"] == kept


def test_an_evaluation_keeps_nothing() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, 120)
    with oomb.Engine(model, oomb.Config(**SETTINGS, keep_outputs="all")) as engine:
        stats = engine.evaluate(ids, ids).stats
    assert stats.kept_output_bytes == stats.kept_output_share == 0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_mode_and_autocast_have_the_same_bits(dropout: float, autocast: bool) -> None:
    model, ids = make("granite", torch.float32), random_ids(1, 120)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda mlp, _, out: torch.nn.functional.dropout(out, dropout, mlp.training)
        )
    model.train()
    results = []
    for keep in ("none", "all"):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(with_slots(model, {**SETTINGS, "keep_outputs": keep}, 24, ids, ids))
    assert_identical(results[1], results[0])


@pytest.mark.parametrize("part", [pytest.param(0, id="some"), *SLOW_PARTS])
def test_a_refused_copy_anywhere_leaves_all_as_it_was(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of a call that makes pages or copies outputs fails in turn; outputs spill."""
    model = make("llama", torch.float32)
    config = recovery.config(model, keep_outputs="all")
    real, count, fails = CallPages.growing, [0], [-1]

    def growing(pages: CallPages, step: Any) -> None:
        count[0] += 1
        if count[0] == fails[0]:
            raise oomb.OutOfMemoryError("refused", needed_bytes=1, available_bytes=0)
        real(pages, step)

    monkeypatch.setattr(CallPages, "growing", growing)
    with oomb.Engine(model, config) as engine:
        expected = recovery.usual(engine, model)
        steps, count[0] = count[0], 0
        assert engine.forward_backward(recovery.IDS, recovery.IDS).stats.host_peak_bytes > 0
        recovery.take_gradients(model)
        moments = range(1, steps + 1)
        for moment in moments[:: steps // 8] if part == 0 else moments[part - 1 :: PARTS]:
            before = recovery.with_gradients(model)
            count[0], fails[0] = 0, moment
            with pytest.raises(oomb.OutOfMemoryError, match="refused"):
                engine.forward_backward(recovery.IDS, recovery.IDS)
            fails[0] = -1
            recovery.assert_untouched(engine, model, before, expected)
