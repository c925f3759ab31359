"""Runs that are killed or asked to stop at any moment go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "killed_runs.py"


def results(kind: str, number: int, folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(number), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    assert len(found) == number
    return found


@pytest.mark.slow
@pytest.mark.release
def test_kill_9_at_20_moments(tmp_path: Path) -> None:
    found = results("kill", 20, tmp_path)
    for result in found:
        assert result["code"] == -9, result
        assert result["resume_code"] == 0, result
        assert result["same_losses"] and result["compared"] == 5, result
    inside = [result for result in found if result["inside"]]
    assert {result["inside"] for result in inside} == {
        "write_manifest",
        "sync",
        "write_marker",
        "prune",
    }
    # Killed between rename and marker: the folder is there, and is rejected for that reason.
    unmarked = [result for result in inside if result["inside"] == "write_marker"]
    assert all("saving it did not finish" in r["rejected"][0] for r in unmarked)
    assert any(result["left"] for result in inside)  # half a folder, or half deleted


@pytest.mark.slow
@pytest.mark.release
def test_sigterm_at_20_chunks(tmp_path: Path) -> None:
    for result in results("stop", 20, tmp_path):
        assert result["code"] == 0, result
        assert result["rejected"] == [], result
        assert result["step"] == result["finished"], result  # the last finished step is saved
        assert result["reports_after"] <= 1, result  # at the next chunk border
        assert result["resume_code"] == 0, result
        assert result["same_losses"] and result["compared"] == 5, result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.sampled(1)
def test_a_script_ends_with_exit_code_0(number: signal.Signals, tmp_path: Path) -> None:
    """A script that knows nothing of signals: an example, stopped from outside and resumed."""
    from oomb.checkpoint import CheckpointStore
    from oomb.cli.demo_model import small_model
    from oomb.cli.demo_tokenizer import byte_tokenizer

    small_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    script = Path(__file__).parents[3] / "examples" / "trainer.py"
    options = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    options += ["--tokens", "1500", "--steps", "200"]
    command = [sys.executable, "-u", str(script), *options]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    line = run.stdout.readline()  # of the first logged step
    run.send_signal(number)
    _, said = run.communicate()
    assert run.returncode == 0, said
    assert "'loss'" in line
    assert f"{number.name}: the step under way was abandoned; step " in said
    assert "Traceback" not in said
    found = CheckpointStore(tmp_path / "run" / "checkpoints").newest_intact()
    assert found is not None and found.rejected == () and 1 <= found.step < 200
    assert not (tmp_path / "run" / "model").exists()  # what comes after train() did not run
