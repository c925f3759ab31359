"""Predicted memory of the process beside what it takes, on ten configurations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "plan_accuracy.py"


@pytest.mark.slow
def test_ten_configurations(tmp_path: Path) -> None:
    out = tmp_path / "accuracy.json"
    command = [sys.executable, str(BENCH), "--device", "cpu", "--no-time", "--json", str(out)]
    done = subprocess.run([*command, "--cpu-time"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        for name in ("process_bytes", "device_pool_bytes", "host_pool_bytes"):
            pair = row[name]
            assert pair["predicted"] == pytest.approx(pair["measured"], rel=0.05), (
                row["case"],
                name,
            )
