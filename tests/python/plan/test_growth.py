"""First steps, whose host tier gets its memory: measured on hosts of H200s, and foretold."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

import oomb
from engine.models import make
from oomb.core import pools as core_pools
from oomb.core.growth import growth_seconds
from oomb.core.pools import Pools
from oomb.plan import Machine, Planner

RESULTS = Path(__file__).parents[3] / "bench" / "results"
LORA = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("file", "first", "then", "there"),
    [
        ("2m-h200-2026-11-22", 0, 1, None),
        ("4m-h200-2026-11-22", 0, 1, None),
        ("kept-sparse-8gib-h200-2026-11-23", 1, 2, 0),  # behind another step, whose memory is there
    ],
)
def test_first_steps_that_were_measured(
    file: str, first: int, then: int, there: int | None
) -> None:
    """Rates are older than these rows, from a bench of their own."""
    rows = json.loads((RESULTS / f"step-qwen2.5-7b-{file}.json").read_text())["rows"]
    grown = rows[first]["host_peak_bytes"] - (
        0 if there is None else rows[there]["host_peak_bytes"]
    )
    growth = growth_seconds(grown, rows[then]["fill_seconds"])
    assert rows[then]["seconds"] + growth == pytest.approx(rows[first]["seconds"], rel=0.2)


def test_new_memory_comes_beside_the_fill() -> None:
    assert growth_seconds(39 * 10**9) == pytest.approx(10)
    assert growth_seconds(71 * 10**9, 10) == pytest.approx(10)
    assert growth_seconds(10**9, 10) == 0


@pytest.mark.slow
def test_a_first_step_that_was_planned() -> None:
    measured = json.loads((RESULTS / "small-cards-h200-2026-11-23.json").read_text())[2]
    machine = Machine.described(gpu="h200", device_memory=24 * 2**30, host_memory="120GiB")
    planner = Planner(measured["model"], machine, dtype=torch.bfloat16, adapter=LORA)
    config = oomb.Config(weights="host", chunk_size=8192, device_memory="4GiB")
    plan = planner.predict(measured["tokens"], config, optimizer=None, dry_run=False)
    assert plan.seconds is not None and plan.growth_seconds is not None
    assert 5 < plan.growth_seconds < 15
    assert plan.seconds + plan.growth_seconds == pytest.approx(measured["seconds"], rel=0.1)


def test_without_a_host_tier_nothing_grows() -> None:
    machine = Machine.described(gpu="h200", host_memory="120GiB")
    planner = Planner("qwen2.5-0.5b", machine)
    assert planner.predict(8192, dry_run=False).growth_seconds == 0
    assert planner.predict(8192, dry_run=False, timed=False).growth_seconds is None


def test_an_engine_s_plan_asks_for_what_is_not_pinned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    with oomb.Engine(make("llama"), oomb.Config(chunk_size=16, page_size=8)) as engine:
        assert engine.plan(200).growth_seconds == 0  # a CPU pins nothing
        pools: Pools = engine._pools
        monkeypatch.setattr(pools, "_device", torch.device("cuda"))
        assert pools.to_pin(1000) == 1000
        host = SimpleNamespace(committed_bytes=500, ready_bytes=600)
        there: Any = SimpleNamespace(stats=lambda: SimpleNamespace(host=host))
        monkeypatch.setattr(pools, "manager", there)
        assert pools.to_pin(1000) == 400 and pools.to_pin(500) == 0
        monkeypatch.undo()


def test_what_was_pinned_ahead_is_room_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with oomb.Engine(make("llama"), oomb.Config(chunk_size=16, page_size=8)) as engine:
        of_pools: Any = engine._pools
        host = SimpleNamespace(committed_bytes=500, ready_bytes=600)
        there = SimpleNamespace(stats=lambda: SimpleNamespace(host=host))
        monkeypatch.setattr(of_pools, "manager", there)
        monkeypatch.setattr(core_pools, "free_memory", lambda device: 1000)
        demand = SimpleNamespace(reach=None)
        needs = SimpleNamespace(others=0, activations=(), host_spare=0)
        assert of_pools.room(demand, engine.config, needs).host_free == 1600
        monkeypatch.undo()
