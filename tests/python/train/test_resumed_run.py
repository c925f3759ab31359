"""What a run that goes on may change, and what is still due when no step is left."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_run import events
from tiny_runs import TEXT, prepare, run

from oomb.hf.evaluation import EvaluatingTrainer


def steps_of(folder: Path, kind: str) -> list[int]:
    return [event["step"] for event in events(folder / "run", kind)]


def ended_in_an_evaluation(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """SIGTERM comes in the first evaluation of a run."""
    own = EvaluatingTrainer.prediction_step

    def ended(*given: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return own(*given, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluatingTrainer, "prediction_step", ended)
        result = run(file)
    assert result.exit_code == 0 and "--resume goes on from there" in result.output, result.output


def test_intervals_are_those_of_the_resumed_run(tmp_path: Path) -> None:
    file = prepare(tmp_path, training={"steps": 2}, saving={"every_steps": None})
    assert run(file).exit_code == 0
    changes = ["training.steps=6", "evaluation.every_steps=2", "saving.every_steps=2"]
    result = run(file, "--resume", *changes, "saving.keep_last=9")
    assert result.exit_code == 0, result.output
    assert steps_of(tmp_path, "eval") == [2, 4, 6]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == [f"step-{step:08d}" for step in (2, 4, 6)]


def test_the_last_evaluation_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prepare(tmp_path, training={"steps": 2})
    ended_in_an_evaluation(monkeypatch, file)
    assert steps_of(tmp_path, "eval") == []
    result = run(file, "--resume")
    assert result.exit_code == 0, result.output
    assert steps_of(tmp_path, "eval") == [2]
    assert steps_of(tmp_path, "step") == [1, 2]
    again = run(file, "--resume")
    assert again.exit_code == 0 and "done already" in again.output, again.output


def test_a_run_goes_on_without_the_evaluation_that_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.txt").write_text(TEXT[:600])
    data = {"eval": str(tmp_path / "held.txt"), "eval_fraction": 0.0}
    file = prepare(tmp_path, training={"steps": 3}, data=data, evaluation={"every_steps": 2})
    ended_in_an_evaluation(monkeypatch, file)
    result = run(file, "--resume", "data.eval=null", "evaluation.every_steps=null")
    assert result.exit_code == 0, result.output
    assert steps_of(tmp_path, "step") == [1, 2, 3] and steps_of(tmp_path, "eval") == []


def test_a_full_disk_leaves_a_run_that_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prepare(tmp_path, training={"steps": 2})
    assert run(file).exit_code == 0
    names = ("run.yaml", "data.sha256", "plan.json")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names}

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        result = run(file, "--resume", "training.steps=3")
    assert result.exit_code == 1
    assert "output_dir: expected a folder that takes files" in result.output
    assert "No space left on device" in result.output
    assert {name: (tmp_path / "run" / name).read_bytes() for name in names} == before
    assert run(file, "--resume", "training.steps=3").exit_code == 0
    assert steps_of(tmp_path, "step") == [1, 2, 3]
