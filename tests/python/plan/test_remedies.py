"""What would make a step fit, with the bytes that it saves and the seconds that it costs."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import oomb
from engine.models import make
from oomb.cli.plan_tables import show
from oomb.plan import Machine, Planner, Recommendation, recommend

ASKED: dict[str, Any] = {"gpu": "h100", "host_bytes": 256 * 2**30}


@pytest.fixture(scope="module")
def full() -> Recommendation:
    """A full fine-tune of a 7B with AdamW: 14 GiB of weights, 28 of sums, 28 of states."""
    return recommend("qwen2.5-7b", 2**17, **ASKED)


def test_a_full_fine_tune_on_80_gb(full: Recommendation) -> None:
    assert not full.fits
    found = {str(remedy): remedy for remedy in full.remedies}
    sums, paged = found["main_grad_dtype=bfloat16"], found["optimizer=paged_adamw_8bit"]
    sum_bytes = full.prediction.sum_bytes
    assert sums.saved_bytes == pytest.approx(sum_bytes / 2, rel=0.05)
    assert paged.saved_bytes == pytest.approx(full.prediction.optimizer_bytes, rel=0.05)
    assert paged.host_bytes > 0 and paged.seconds is not None and paged.seconds > 0
    assert any(remedy.fits for remedy in full.remedies)
    assert [r.fits for r in full.remedies] == sorted((r.fits for r in full.remedies), reverse=True)


def test_the_first_is_named_and_alters_least(full: Recommendation) -> None:
    first = full.remedies[0]
    assert first.fits
    assert any(f"it fits with {first}" in sentence for sentence in full.advice)
    alike = [remedy.alters for remedy in full.remedies if remedy.fits]
    assert alike == sorted(alike)


def test_states_on_the_host_alter_nothing(full: Recommendation) -> None:
    remedy = next(one for one in full.remedies if str(one) == "optimizer_states=host")
    assert remedy.alters == 0 and remedy.seconds is not None and 0 < remedy.seconds < 2
    assert remedy.host_bytes == pytest.approx(full.prediction.optimizer_bytes)
    assert remedy.fits and full.remedies[0].alters == 0


@pytest.mark.parametrize("weights", ["zero1", "zero3"])
@pytest.mark.sampled(1)
def test_beside_shards_only_what_goes_with_them(weights: str) -> None:
    machine = Machine.described(gpu="h100", host_memory=2**38).of_rank(2, weights=weights)
    found = recommend("qwen2.5-14b", 2**17, machine=machine, optimizer="adamw_torch")
    assert not found.fits
    names = {name for remedy in found.remedies for name, _ in remedy.changes}
    assert not names & {"weights", "optimizer", "optimizer_states"}
    assert ("main_grad_device" in names) == (weights == "zero3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_can_be_set_and_saves(dtype: torch.dtype) -> None:
    """Sums in bf16 are for parameters in bf16; the row of all has what saved something alone."""
    described = Machine.described(device_memory="48GiB", host_memory="1GiB")
    machine = replace(described, device_bytes=100_000, host_bytes=0)
    config = oomb.Config(chunk_size=512)
    found = recommend(make("llama", dtype), 4096, machine=machine, config=config, timed=False)
    assert not found.fits
    *single, together = found.remedies
    names = {name for remedy in single for name, _ in remedy.changes}
    assert ("main_grad_dtype" in names) == (dtype == torch.bfloat16)
    assert all(len(remedy.changes) == 1 for remedy in single)
    assert 1 < len(together.changes) == len(names)
    assert set(together.changes) <= {change for remedy in single for change in remedy.changes}


def test_what_an_engine_refuses_is_no_plan() -> None:
    model, config = make("llama", torch.float32), oomb.Config(main_grad_dtype="bfloat16")
    refusals = []
    for ask in (
        lambda: oomb.Engine(model, config),
        lambda: Planner(model, Machine.here("cpu")).predict(64, config, timed=False),
    ):
        with pytest.raises(ValueError, match="main_grad_dtype: expected 'float32'") as refused:
            ask()
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_what_fits_needs_none() -> None:
    result = recommend("qwen2.5-0.5b", 2**14, timed=False, **ASKED)
    assert result.fits and result.remedies == ()


def test_the_command_shows_them(full: Recommendation) -> None:
    text = io.StringIO()
    show(Console(file=text, width=100), "qwen2.5-7b", full)
    assert re.search(r"main_grad_dtype=bfloat16 +14.19 GiB .*yes", text.getvalue())
    assert "what would need less" in text.getvalue()
