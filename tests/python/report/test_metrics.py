"""Records on disk: torn lines, resumes, values that JSON does not know."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import oomb
from oomb.monitor import MetricsWriter, read_metrics


def write(path: Path, *records: tuple[str, dict[str, Any]]) -> None:
    with MetricsWriter(path) as writer:
        for event, record in records:
            writer.write(event, record)


def losses(path: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(path).steps}


def test_each_record_is_a_line_of_json(tmp_path: Path) -> None:
    config = oomb.Config(attention=oomb.TopKPages(budget=3))
    write(
        tmp_path / "runs" / "m.jsonl",
        ("start", {"config": config, "path": tmp_path}),
        ("step", {"step": 1, "loss": torch.tensor(2.5), "grad_norm": float("nan")}),
    )
    start, step = map(json.loads, (tmp_path / "runs" / "m.jsonl").read_text().splitlines())
    assert start["config"]["attention"]["type"] == "TopKPages"
    assert start["config"]["attention"]["budget"] == 3
    assert start["path"] == str(tmp_path)
    assert step["loss"] == 2.5 and step["grad_norm"] is None and step["event"] == "step"


def test_words_for_what_is_not_finite_are_read_as_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    words = '"loss": NaN, "grad_norm": Infinity, "seconds": -Infinity'
    path.write_text(f'{{"event": "step", "step": 1, {words}}}\n')
    (step,) = read_metrics(path).steps
    assert step == {"event": "step", "step": 1, "loss": None, "grad_norm": None, "seconds": None}


def test_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.write("step", {"step": 1, "loss": 1.0})
    assert losses(path) == {1: 1.0}


def test_a_closed_writer_opens_its_file_again_for_a_later_record(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.write("step", {"step": 1, "loss": 1.0})
    writer.close()
    with path.open("a") as file:
        file.write('{"event": "st')
    writer.write("step", {"step": 2, "loss": 2.0})
    writer.close()
    writer.close()
    assert losses(path) == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("kept", range(0, 40, 3))
def test_torn_last_line_is_left_out_and_repaired(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "m.jsonl"
    write(path, ("step", {"step": 1, "loss": 1.0}))
    whole = path.stat().st_size
    write(path, ("step", {"step": 2, "loss": 2.0}))
    os.truncate(path, whole + kept)
    assert losses(path) == {1: 1.0}
    write(path, ("step", {"step": 2, "loss": 3.0}))
    assert losses(path) == {1: 1.0, 2: 3.0}


def test_torn_line_longer_than_a_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, ("step", {"step": 1, "loss": 1.0}))
    with path.open("ab") as file:
        file.write(b'{"event": "' + b"x" * 200_000)
    write(path, ("step", {"step": 2, "loss": 2.0}))
    assert losses(path) == {1: 1.0, 2: 2.0}


def test_file_of_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "st')
    assert losses(path) == {}
    write(path, ("step", {"step": 1, "loss": 1.0}))
    assert losses(path) == {1: 1.0}


def test_line_in_the_middle_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "end"}\nnonsense\n{"event": "end"}\n')
    with pytest.raises(ValueError, match="line 2: expected a JSON object"):
        read_metrics(path)


def test_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("step", {"step": 1, "loss": 1.0})
        before, write_all = path.read_bytes(), os.write
        monkeypatch.setattr(os, "write", lambda file, data: write_all(file, data[:7]))
        with pytest.raises(OSError, match="disk is full"):
            writer.write("step", {"step": 2, "loss": 2.0})
        monkeypatch.undo()
        assert path.read_bytes() == before
        writer.write("step", {"step": 2, "loss": 2.5})
    assert losses(path) == {1: 1.0, 2: 2.5}


def test_resume_supersedes_what_came_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(
        path,
        ("start", {"model": "first"}),
        *(("step", {"step": step, "loss": float(step)}) for step in range(1, 6)),
        *(("chunk", {"step": step, "chunk": 0}) for step in (1, 5)),
        ("eval", {"step": 5, "loss": 9.0}),
        ("end", {"reason": "error"}),
    )
    write(
        path,
        ("start", {"model": "second", "resumed_from_step": 3}),
        ("step", {"step": 4, "loss": 40.0}),
    )
    metrics = read_metrics(path)
    assert losses(path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}
    assert list(metrics.chunks) == [1] and not metrics.evals
    assert metrics.start["model"] == "second" and metrics.end is None


def test_fresh_start_supersedes_everything(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, ("start", {}), ("step", {"step": 1, "loss": 1.0}))
    write(path, ("start", {"resumed_from_step": None}), ("step", {"step": 2, "loss": 2.0}))
    assert losses(path) == {2: 2.0}


def test_a_step_recorded_twice_counts_once_the_last_time(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, *(("step", {"step": step, "loss": loss}) for step, loss in ((2, 1.0), (1, 5.0))))
    write(path, ("step", {"step": 2, "loss": 3.0}))
    assert [(r["step"], r["loss"]) for r in read_metrics(path).steps] == [(1, 5.0), (2, 3.0)]


def test_evaluations_of_a_step_are_kept_by_the_name_of_their_set(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    told = ((4, "b", 1.0), (2, "b", 2.0), (2, "a", 3.0), (2, None, 4.0), (2, "b", 5.0))
    for step, name, loss in told:
        write(path, ("eval", {"step": step, "loss": loss, **({"name": name} if name else {})}))
    found = [(r["step"], r.get("name"), r["loss"]) for r in read_metrics(path).evals]
    assert found == [(2, "b", 5.0), (2, "a", 3.0), (2, None, 4.0), (4, "b", 1.0)]
