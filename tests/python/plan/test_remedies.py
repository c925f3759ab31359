"""What would make a step fit, with the bytes that it saves and the seconds that it costs."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from oomb.cli.plan_tables import show
from oomb.plan import Machine, Recommendation, recommend

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
def test_beside_shards_only_what_goes_with_them(weights: str) -> None:
    machine = Machine.described(gpu="h100", host_memory=2**38).of_rank(2, weights=weights)
    found = recommend("qwen2.5-14b", 2**17, machine=machine, optimizer="adamw_torch")
    assert not found.fits
    names = {name for remedy in found.remedies for name, _ in remedy.changes}
    assert not names & {"weights", "optimizer", "optimizer_states"}
    assert ("main_grad_device" in names) == (weights == "zero3")


def test_what_fits_needs_none() -> None:
    result = recommend("qwen2.5-0.5b", 2**14, timed=False, **ASKED)
    assert result.fits and result.remedies == ()


def test_the_command_shows_them(full: Recommendation) -> None:
    text = io.StringIO()
    show(Console(file=text, width=100), "qwen2.5-7b", full)
    assert re.search(r"main_grad_dtype=bfloat16 +14.19 GiB .*yes", text.getvalue())
    assert "what would need less" in text.getvalue()
