"""``oomb train`` on a base whose weights stay on the host."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_runs import prepare, run


def test_the_adapters_are_those_of_a_base_on_the_device(tmp_path: Path) -> None:
    trained = []
    for weights in ("device", "host"):
        place = tmp_path / weights
        place.mkdir()
        done = run(prepare(place, lora={"r": 4}, engine={"weights": weights}))
        assert done.exit_code == 0, done.output
        trained.append(load_file(place / "run" / "model" / "adapter_model.safetensors"))
    ours, expected = trained
    assert ours.keys() == expected.keys() and ours
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_samples_are_refused(tmp_path: Path) -> None:
    settings = {"weights": "host"}
    written = {"generate": {"prompts": "1 squared"}}
    done = run(prepare(tmp_path, lora={"r": 4}, engine=settings, evaluation=written))
    assert done.exit_code == 2
    assert "evaluation.generate: expected none beside engine.weights" in done.output
