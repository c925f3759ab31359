"""``oomb train`` with ``optimizer.states: host``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_runs import prepare, run


def test_the_model_is_that_of_states_on_the_device(tmp_path: Path) -> None:
    trained = []
    for states in ("device", "host"):
        place = tmp_path / states
        place.mkdir()
        done = run(prepare(place, optimizer={"states": states, "name": "adamw_torch"}))
        assert done.exit_code == 0, done.output
        trained.append(load_file(place / "run" / "model" / "model.safetensors"))
        plan = json.loads((place / "run" / "plan.json").read_text())
        assert (plan["predicted"]["optimizer_host_bytes"] > 0) == (states == "host")
    ours, expected = trained
    assert ours.keys() == expected.keys() and ours
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_refused_by_name(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    for changes, words in (
        ({"name": "paged_adamw_8bit"}, "take 'adamw_8bit'"),
        ({"name": "schedule_free_adamw"}, "optimizer.name: expected one that works here"),
    ):
        given = [f"optimizer.{name}={value}" for name, value in changes.items()]
        done = run(file, "optimizer.states=host", *given)
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())
        assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()
