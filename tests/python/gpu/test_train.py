"""``oomb train`` on a GPU: from the plan of the machine at hand to a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.tiny_runs import prepare, run

pytestmark = pytest.mark.gpu


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "step"]


def test_as_on_the_cpu(tmp_path: Path) -> None:
    """The same losses to what fp32 rounds, also where the run stops in the middle and goes on."""
    found = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        file = prepare(folder, model={"device": device, "dtype": "float32"})
        result = run(file, "training.steps=2")
        assert result.exit_code == 0, result.output
        result = run(file, "--resume")
        assert result.exit_code == 0, result.output
        found[device] = losses(folder / "run")
    assert len(found["cpu"]) == 4
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-4)
