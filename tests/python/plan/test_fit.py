"""Whether a call fits is one question with one answer, whoever asks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import oomb
from engine.models import make
from engine.recurrent_models import RECURRENT, make_recurrent
from oomb.core import pools
from oomb.core.copying import Copying
from oomb.core.fit import Room, fit
from oomb.core.layout import Chunks, GradientReach
from oomb.core.page_demand import PageDemand
from oomb.core.tiers import Held, PageLayout
from oomb.engine import calls, needs
from oomb.errors import OutOfMemoryError
from oomb.model.layer_shape import LayerShape
from oomb.plan import Machine, Planner

# (model, random demands): 501 of them before a release, and 30 with states at borders.
MODELS = [
    ("llama", 30),
    ("nemotron-h", 30),
    *(
        pytest.param(name, 157, marks=[pytest.mark.slow, pytest.mark.release])
        for name in ("llama", "mistral", "qwen3")
    ),
]


class Begun(BaseException):
    """The call's first chunk would run now."""


def random_config(draw: random.Random, *, every_chunk: bool) -> oomb.Config:
    """every_chunk: it sweeps all of them, as states ask."""
    chunk = draw.choice([16, 32, 48])
    cap = [None, None, 1 << draw.randint(12, 22)]
    others = [] if every_chunk else [oomb.SampledChunks(keep=0.6), oomb.TruncatedChunks(window=2)]
    return oomb.Config(
        chunk_size=chunk,
        page_size=8,
        attention=draw.choice([oomb.Dense(), oomb.Dense(), oomb.TopKPages(budget=3)]),
        backward=draw.choice([oomb.AllChunks(), *others]),
        device_memory=draw.choice(cap),
        host_memory=draw.choice([None, None, 1 << draw.randint(14, 23)]),
        kv_grad_dtype=draw.choice(["float32", "bfloat16"]),
        recompute=draw.choice(["auto", "none", "layer"]),
        keep_outputs=draw.choice(["none", "auto", "all", draw.random()]),
    )


@pytest.mark.parametrize(("name", "number"), MODELS)
def test_engine_and_plans_agree(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses a call before its first chunk exactly where both plans say so."""
    draw = random.Random(f"{name} {number}")
    has_states = name in RECURRENT
    build = make_recurrent if has_states else make
    model = build(name, torch.float32, max_position_embeddings=2048)
    planner = Planner(model, Machine.here("cpu"))
    weights, fitting, kept = planner.tracer.parameter_bytes, 0, 0

    def begun(demand: Any, *_: Any) -> None:
        raise Begun(demand.outputs.num_bytes)

    monkeypatch.setattr(pools, "begin_pages", begun)
    with oomb.Engine(model) as engine:
        for _ in range(number):
            config = random_config(draw, every_chunk=has_states)
            batch = draw.randint(1, 3)
            tokens = draw.randint(config.chunk_size + 1, 40 * config.chunk_size)
            free = int(2 ** draw.uniform(18, 25))
            for module in (pools, calls, needs):
                monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
            engine.config = engine._training.config = config
            engine._calls._recompute.clear()
            engine._pools.close()
            ids = torch.randint(97, (batch, tokens))
            found = -1  # bytes that are kept; -1: refused
            try:
                engine.forward_backward(ids, ids)
            except Begun as stopped:
                found = stopped.args[0]
            except OutOfMemoryError:
                pass
            engine._pools.close()
            asked = f"{config}, {batch} x {tokens} tokens, {free} bytes free"
            plan = engine.plan(tokens, batch)
            machine_bytes = free + weights + 24 * batch * (tokens - 1)
            planner.machine = replace(
                planner.machine, device_bytes=machine_bytes, host_bytes=machine_bytes
            )
            prediction = planner.predict(
                tokens,
                config,
                batch_size=batch,
                optimizer=None,
                timed=False,
                dry_run=False,
                step=0,
            )
            assert (plan.fits, prediction.fits) == (found >= 0, found >= 0), asked
            if found >= 0:
                assert plan.kept_output_bytes == prediction.kept_output_bytes == found, asked
            fitting, kept = fitting + (found >= 0), kept + (found > 0)
    assert 0.2 * number < fitting < 0.9 * number
    assert kept > 0.1 * number or has_states  # its one layer of pages is the last: never kept


def random_demand(draw: random.Random) -> PageDemand:
    layers, heads = draw.randint(1, 6), draw.choice([4, 28])
    window = draw.choice([0, 0, 3000])
    shapes = [LayerShape(heads, 4, 128, 0), LayerShape(heads, 4, 128, window)] * layers
    chunks = Chunks(draw.randint(2, 200_000), draw.choice([1024, 4096]), 128)
    rules = [oomb.AllChunks(), oomb.TruncatedChunks(window=3)]
    swept = sorted(draw.sample(range(chunks.number), draw.randint(1, chunks.number)))
    return PageDemand(
        chunks=chunks,
        reach=GradientReach.of(draw.choice(rules), swept),
        shapes=shapes,
        layout=PageLayout.of(4, 128, 128, torch.bfloat16, draw.choice(["float32", "bfloat16"])),
        batch=draw.randint(1, 3),
        device_type=draw.choice(["cpu", "cuda"]),
        selection=draw.choice([None, oomb.TopKPages(budget=64)]),
    )


def random_room(draw: random.Random, demand: PageDemand) -> Room:
    pages = demand.needed_slots * demand.layout.slot_bytes
    one = demand.device_type == "cpu"

    def size() -> int:
        return int(pages * 2 ** draw.uniform(-4, 2))

    def cap() -> int | None:
        return draw.choice([None, None, size()])

    device = size() + 2**30
    return Room(
        one_memory=one,
        device_free=device,
        host_free=device if one else size(),
        device_cap=cap(),
        host_cap=cap(),
        others=int(0.3 * device * draw.random()),
        host_others=int(0.1 * pages * draw.random()),
        host_spare=int(0.5 * pages * draw.random()),
        driver=draw.choice([None, None, size()]),
    )


def test_auto_fits_wherever_none_does() -> None:
    """It takes no slot from pages, no more than each tier has, and of free memory not all."""
    draw, kept, refused = random.Random(17), 0, 0
    for _ in range(500):
        demand = random_demand(draw)
        room, slot = random_room(draw, demand), demand.layout.slot_bytes
        held = None
        if draw.random() < 0.4:
            most = 2 * demand.needed_slots
            held = Held(draw.randint(1, most), draw.randint(0, most))
        asked = f"{demand}, {room}, {held}"
        try:
            none = fit(demand, "none", room, held=held).caps
        except OutOfMemoryError:
            with pytest.raises(OutOfMemoryError):
                fit(demand, "auto", room, linear_flops=5e8, held=held)
            refused += 1
            continue
        found = fit(demand, "auto", room, linear_flops=5e8, held=held)
        caps, outputs = found.caps, found.outputs.slots
        kept += outputs > 0
        needed = demand.needed_slots
        assert none.device_slots <= caps.device_slots, asked
        assert needed + outputs <= caps.device_slots + caps.host_slots, asked
        spilled = needed > none.device_slots
        if spilled:
            assert caps.device_slots == none.device_slots, asked
        if caps.host_slots and not spilled:
            assert not room.one_memory, asked
        if outputs:
            fresh = (caps.device_slots - none.device_slots) * slot
            limit = room.device_free * 0.9 - room.beside
            assert fresh == 0 or caps.device_slots * slot <= limit, asked
            on_host = max(0, needed + outputs - caps.device_slots) * slot
            if on_host:
                assert on_host <= room.host(caps.device_slots * slot), asked
            share = fit(demand, found.outputs.share, room, held=held)
            assert share.outputs.slots == outputs, asked
    assert kept > 100
    assert refused > 50


@pytest.mark.parametrize(
    ("device", "selection"), [("cpu", None), ("cuda", oomb.TopKPages(budget=64))]
)
@pytest.mark.parametrize("share", [0.85, 0.95, 0.999])
def test_pools_too_small_for_the_pages_alone_are_not_used_again(
    device: str, selection: oomb.TopKPages | None, share: float
) -> None:
    """Pools of a call that was a little shorter, where few outputs are kept beside the pages."""
    demand = PageDemand(
        chunks=Chunks(32_767, 1024, 128),
        reach=GradientReach(range(32), None),
        shapes=[LayerShape(4, 4, 128, 0)] * 8,
        layout=PageLayout.of(4, 128, 128, torch.bfloat16, "float32"),
        batch=1,
        device_type=device,
        selection=selection,
    )
    needed, slot = demand.needed_slots, demand.layout.slot_bytes
    free = int(1.04 * needed * slot / 0.9)
    room = Room(one_memory=device == "cpu", device_free=free, host_free=free)
    for keep in ("none", "auto"):
        held = Held(int(share * needed), 0)
        found = fit(demand, keep, room, linear_flops=5e9, held=held)
        assert (found.outputs.slots > 0) == (keep == "auto")
        assert found.caps.device_slots >= needed
        assert found.caps.device_slots + found.caps.host_slots >= needed + found.outputs.slots


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_of_what_nobody_gave_is_left(device: str) -> None:
    demand = PageDemand(
        chunks=Chunks(131_071, 4096, 128),
        reach=GradientReach(range(32), None),
        shapes=[LayerShape(28, 4, 128, 0)] * 28,
        layout=PageLayout.of(4, 128, 128, torch.bfloat16, "float32"),
        batch=1,
        device_type=device,
        selection=None,
    )
    pages = demand.needed_slots * demand.layout.slot_bytes
    free = int((pages + 2 * 2**30) / 0.9) + 2**20
    on_cpu = device == "cpu"
    room = Room(one_memory=on_cpu, device_free=free, host_free=free * on_cpu)
    found = fit(demand, "auto", room, linear_flops=4.7e8)
    assert 0.95 * 2**30 < found.outputs.num_bytes <= 2**30 + 2**20
    assert found.caps.host_slots == 0
    assert found.caps.device_slots == demand.needed_slots + found.outputs.slots
    none = replace(room, host_free=free, driver=pages // 2)
    if not on_cpu:  # the driver gives less than it says: pages spill, and outputs with them
        spilled = fit(demand, "auto", replace(none, host_free=4 * free), linear_flops=4.7e8)
        assert spilled.caps.device_slots == demand.needed_slots // 2
        assert spilled.outputs.slots > 0


@pytest.mark.parametrize(
    ("chunk_size", "budget", "uses_host"),
    [(8192, 64, True), (4096, 64, True), (4096, 4, False), (1024, 64, False)],
)
def test_page_lists_travel_only_for_outputs_that_save_more(
    chunk_size: int, budget: int, uses_host: bool
) -> None:
    """Pages fit a GPU and some outputs do not: on the host they cost each layer its list."""
    num_tokens = 64 * chunk_size
    demand = PageDemand(
        chunks=Chunks(num_tokens - 1, chunk_size, 128),
        reach=GradientReach(range(64), None),
        shapes=[LayerShape(14, 2, 128, 0)] * 28,
        layout=PageLayout.of(2, 128, 128, torch.bfloat16, "bfloat16"),
        batch=1,
        device_type="cuda",
        selection=oomb.TopKPages(budget=budget),
    )
    pages = demand.needed_slots * demand.layout.slot_bytes
    room = Room(one_memory=False, device_free=int(1.1 * pages / 0.9), host_free=8 * pages)
    found = fit(demand, "auto", room, linear_flops=4.7e8)
    assert (found.caps.host_slots > 0) == uses_host
    assert found.outputs.slots > 0
    dense = fit(replace(demand, selection=None), "auto", room, linear_flops=4.7e8)
    assert dense.caps.host_slots > 0  # where nothing has to be listed


@pytest.mark.parametrize("sparse", [True, False])
def test_outputs_in_torchs_memory_are_compared_with_more_of_them_on_the_host(sparse: bool) -> None:
    """Where the sweep recomputes layers, what a few outputs leave behind them spares most."""
    demand = PageDemand(
        chunks=Chunks(64 * 8192 - 1, 8192, 128),
        reach=GradientReach(range(64), None),
        shapes=[LayerShape(14, 2, 128, 0)] * 28,
        layout=PageLayout.of(2, 128, 128, torch.bfloat16, "bfloat16"),
        batch=1,
        device_type="cuda",
        selection=oomb.TopKPages(budget=64) if sparse else None,
        ranks=2,
    )
    pages, gib = demand.needed_slots * demand.layout.slot_bytes, 2**30
    room = Room(
        one_memory=False,
        device_free=int(3 * pages / 0.9),
        host_free=200 * gib,
        activations=(17 * gib, 11 * gib, 2 * gib),
    )
    found = fit(demand, "auto", room, linear_flops=4.7e8)
    assert found.outputs.loose == sparse  # dense attention of such a past is worth more than layers
    assert (found.caps.host_slots == 0) == sparse
    poor = fit(demand, "auto", replace(room, host_free=0), linear_flops=4.7e8)
    assert poor.outputs.loose
    few = fit(
        demand, "auto", room, linear_flops=4.7e4
    )  # of which there is hardly anything to spare
    assert not few.outputs.loose


def test_lists_are_those_of_layers_and_chunks_that_choose() -> None:
    def lists(shapes: list[LayerShape], budget: int) -> float:
        demand = PageDemand(
            chunks=Chunks(8 * 4096 - 1, 4096, 128),
            reach=GradientReach(range(8), None),
            shapes=shapes,
            layout=PageLayout.of(4, 128, 128, torch.bfloat16, "bfloat16"),
            batch=1,
            device_type="cuda",
            selection=oomb.TopKPages(budget=budget),
        )
        return Copying(demand, 4.7e8, 0.0).lists

    whole, window = LayerShape(8, 4, 128, 0), LayerShape(8, 4, 128, 1024)
    assert lists([whole] * 6, 16) > 0
    assert lists([window, whole, window] * 6, 16) == lists([whole] * 6, 16)
    assert lists([whole] * 6, 1024) == 0  # all of the past
