"""Trainers on two GPUs, started as users start them: what one GPU logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROGRAM = Path(__file__).with_name("launched.py")
OF_TRL = Path(__file__).with_name("launched_trl.py")
LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no",
}


def losses(results: Path, *command: str, devices: str = "0,1") -> dict[str, list[float]]:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": devices},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, list[float]] = json.loads(results.read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    results = tmp_path_factory.mktemp("alone") / "losses.json"
    return losses(results, str(PROGRAM), str(results), devices="0")


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_has_the_losses_of_one_gpu(
    launcher: str, groups: int, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    """Both share each sequence, by default and when asked to; or each has one of its own."""
    results = tmp_path / "losses.json"
    command = ["-m", *LAUNCHERS[launcher].split(), str(PROGRAM), str(results)]
    if groups:
        command += ["--groups", str(groups), "--processes", "2"]
    found = losses(results, *command)
    assert len(found["loss"]) == 6
    for name, values in alone.items():
        assert found[name] == pytest.approx(values, rel=1e-4), name


@pytest.fixture(scope="module")
def alone_with_trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    pytest.importorskip("trl")
    folder, found = tmp_path_factory.mktemp("trl"), {}
    for kind in ("GRPO", "RLOO", "Reward"):
        results = folder / f"{kind}.json"
        found[kind] = losses(results, str(OF_TRL), str(results), "--kind", kind, devices="0")
    return found


@pytest.mark.parametrize("weights", ["", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Reward"])
def test_trl_with_shared_weights_logs_what_one_gpu_does(
    kind: str, weights: str, alone_with_trl: dict[str, dict[str, list[float]]], tmp_path: Path
) -> None:
    """Both GPUs share each sequence; the first writes the completions of both."""
    results = tmp_path / "logged.json"
    command = ["-m", *LAUNCHERS["torchrun"].split(), str(OF_TRL), str(results), "--kind", kind]
    found = losses(results, *command, *(["--weights", weights] if weights else []))
    assert len(found["loss"]) == (2 if kind == "Reward" else 4)
    for name, values in alone_with_trl[kind].items():
        assert found[name] == pytest.approx(values, rel=1e-3, abs=1e-5), name
