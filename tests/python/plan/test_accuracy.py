"""Predicted memory of the process beside what it takes, on twelve configurations."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "plan_accuracy.py"
SHORT = ["--chunk", "256"]  # half the bench's own: as exact, and half the work
RUNS = (
    ("full,recompute,sampled,two-tiers,batch,topk-two-tiers", SHORT),
    ("lora,topk,windows,two-tiers-bf16,topk-uniform", SHORT),
    ("large-vocabulary", []),
)


def rows_of(cases: str, options: list[str], out: Path) -> list[dict[str, Any]]:
    options = ["--device", "cpu", "--no-time", "--cpu-time", "--json", str(out), *options]
    command = [sys.executable, str(BENCH), *options, "--cases", cases]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


@pytest.mark.slow
@pytest.mark.release
def test_twelve_configurations(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(rows_of, *run, tmp_path / f"{i}.json") for i, run in enumerate(RUNS)]
        rows = [row for run in runs for row in run.result()]
    assert len(rows) == 12
    for row in rows:
        for name in ("process_bytes", "device_pool_bytes", "host_pool_bytes"):
            pair = row[name]
            where = (row["case"], name)
            assert pair["predicted"] == pytest.approx(pair["measured"], rel=0.05), where
