"""A reference model in the plan of a run: its bytes, and what ``auto`` makes of them."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import Qwen2Config

from oomb.plan import Machine, Prediction
from oomb.trace.bare import bare_model
from oomb.train import arguments, planning
from oomb.train.settings import RunSettings

CONFIG = Qwen2Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    dtype="float32",
)
WHOLE = sum(p.nbytes for p in bare_model(CONFIG).parameters())
RANKS = 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans for a GPU of so many bytes, of a job of so many ranks."""

    def planned_for(ranks: int, device_bytes: int) -> None:
        machine = Machine.described(device_memory=device_bytes + 2**30, host_memory="16GiB")
        monkeypatch.setattr(Machine, "here", lambda _: machine)
        monkeypatch.setattr(arguments, "ranks_in_job", lambda: ranks)
        monkeypatch.setattr(arguments, "device_of", lambda _: torch.device("cuda"))
        monkeypatch.setattr(planning, "ranks_of_host", lambda: ranks)

    return planned_for


def plan(task: str, console: Console | None = None, **changes: Any) -> Prediction:
    """A run on two sequences: those of a pair, or two examples."""
    given: dict[str, Any] = {
        "output_dir": "run",
        "model": {"name": "model"},
        "data": {"train": "rows.jsonl"},
        "context": 512,
        "engine": {"chunk_size": 64, "page_size": 16},
        "training": {"steps": 1, "batch_size": 1 if task == "dpo" else 2},
        "optimizer": {"name": "adamw_torch"},
        "task": task,
    }
    told = RunSettings.model_validate(given | changes)
    return planning.plan_run(told, CONFIG, told.context, console or Console(quiet=True))


@pytest.mark.parametrize(
    ("task", "weights"), [("dpo", "replicated"), ("kto", "zero1"), ("dpo", "zero3")]
)
def test_a_reference_is_the_whole_difference(gpu: Any, task: str, weights: str) -> None:
    gpu(1 if weights == "replicated" else RANKS, 2**30)
    parallel = {"parallel": {"weights": weights}}
    alone, beside = plan("sft", **parallel).as_dict(), plan(task, **parallel).as_dict()
    shared = 1 if weights == "replicated" else RANKS
    buffers = sum(b.nbytes for b in bare_model(CONFIG).buffers())
    assert beside["reference_bytes"] == WHOLE // shared + buffers == alone["parameter_bytes"]
    for name in ("reference_bytes", "device_bytes", "torch_peak_bytes"):
        assert beside.pop(name) - alone.pop(name) == WHOLE // shared + buffers, name
    assert alone == beside


@pytest.mark.parametrize(
    ("task", "changes", "held"),
    [
        ("dpo", {"lora": {"r": 4}}, False),  # adapters are switched off
        ("kto", {"trl": {"precompute_ref_log_probs": True}}, False),
        ("grpo", {"trl": {"beta": 0.1}, "rewards": ["think_format_reward"]}, True),
        ("grpo", {"trl": {"beta": 0.0}, "rewards": ["think_format_reward"]}, False),
        ("rloo", {"rewards": ["think_format_reward"]}, True),  # beta is 0.05
        ("reward", {}, False),
    ],
)
def test_which_runs_hold_one(gpu: Any, task: str, changes: dict[str, Any], held: bool) -> None:
    gpu(1, 2**30)
    found = plan(task, **changes)
    assert found.reference_bytes == (found.parameter_bytes if held else 0)


def test_auto_shares_weights_for_the_reference(gpu: Any) -> None:
    """With memory between what the two runs need beside one another's weights whole."""
    gpu(RANKS, 2**30)
    alone = plan("sft", parallel={"weights": "replicated"})
    gpu(RANKS, alone.device_bytes + WHOLE // 2)
    auto = {"parallel": {"weights": "auto"}}
    assert plan("sft", **auto).machine.weights == "replicated"
    assert plan("dpo", **auto).machine.weights == "zero1"


def test_it_is_told(gpu: Any) -> None:
    gpu(1, 2**30)
    said = StringIO()
    console = Console(file=said, width=500)
    plan("dpo", console)
    plan("sft", console)
    of_dpo, of_sft = said.getvalue().splitlines()
    assert "MiB the reference)" in of_dpo
    assert "reference" not in of_sft
