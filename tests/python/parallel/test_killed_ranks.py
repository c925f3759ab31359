"""``oomb train`` under torchrun loses a rank to SIGKILL, ends, and goes on to the same losses."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "kill_ranks.py"
LONGEST_SECONDS = 30.0  # on a machine that does other work; the bench tells what it takes


def test_a_run_that_fails_by_itself_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH.parent)
    bench = importlib.import_module("kill_ranks")
    (tmp_path / "log.txt").write_text("a reason")

    def failed(*_: object, **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(bench, "started", failed)
    files = tmp_path / "run.yaml", tmp_path / "run"
    with pytest.raises(SystemExit, match="nobody had killed:\na reason"):
        bench.kill_once(*files, 2, random.Random(0), tmp_path / "log.txt")


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
