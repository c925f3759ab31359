"""``oomb train`` under torchrun loses a rank to SIGKILL, ends, and goes on to the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "kill_ranks.py"
LONGEST_SECONDS = 30.0  # on a machine that does other work; the bench tells what it takes


@pytest.mark.slow
def test_a_killed_rank(tmp_path: Path) -> None:
    """More kills: python bench/kill_ranks.py --kills 20."""
    record = tmp_path / "kills.json"
    command = [sys.executable, str(BENCH), "--kills", "1", "--json", str(record)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert [kill["ranks"] for kill in found["kills"]] == [2]
    assert found["longest_seconds"] < LONGEST_SECONDS
    assert found["largest_difference"] < 1e-6
