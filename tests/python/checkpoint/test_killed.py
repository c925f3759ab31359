"""Runs that are killed or asked to stop at any moment go on as if nothing had happened."""

from __future__ import annotations

import json
import os
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
def test_sigterm_at_20_chunks(tmp_path: Path) -> None:
    for result in results("stop", 20, tmp_path):
        assert result["code"] == 0, result
        assert result["rejected"] == [], result
        assert result["step"] == result["finished"], result  # the last finished step is saved
        assert result["reports_after"] <= 1, result  # at the next chunk border
        assert result["resume_code"] == 0, result
        assert result["same_losses"] and result["compared"] == 5, result
