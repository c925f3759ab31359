"""``oomb train`` on images in pairs of processes that share each sequence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .world import World, as_started

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from images_for_tests import prepare_images
from test_image_runs import losses
from tiny_runs import run

RANKS = 4


def trained(rank: int, folder: Path, name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of ``oomb train`` on one rank; -1: in one process."""
    with as_started(rank, RANKS):
        result = run(folder / "run.yaml", f"output_dir={folder / name}", *arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("weights", ["replicated", "zero3"])
@pytest.mark.sampled(1)
def test_pairs_are_one_process_that_accumulates(world: World, tmp_path: Path, weights: str) -> None:
    prepare_images(
        tmp_path,
        data={"arrange": "packed", "eval_fraction": 0.0},
        training={"steps": 2},
        saving={"every_steps": None},
    )
    code, output = trained(-1, tmp_path, "alone", "training.accumulation_steps=2")
    assert code == 0, output
    asked = ["parallel.cp=2", f"parallel.weights={weights}"]
    found = world.run(trained, tmp_path, "pairs", *asked)
    assert [code for code, _ in found] == [0] * RANKS, found
    assert losses(tmp_path / "pairs") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    plan = json.loads((tmp_path / "pairs" / "plan.json").read_text())
    assert plan["predicted"]["ranks"] == 2
    assert ", 9 images" in found[0][1]
    begun, ours, theirs = (tower(tmp_path / x / "model") for x in (".", "alone", "pairs"))
    assert (ours - begun).norm() > 0
    assert (ours - theirs).norm() < 1e-3 * (ours - begun).norm()


def tower(folder: Path) -> torch.Tensor:
    """Its weights that gradients of more than rounding reach."""
    weights = load_file(folder / "model.safetensors")
    names = [x for x in sorted(weights) if "vision" in x and not x.endswith("k_proj.bias")]
    return torch.cat([weights[name].flatten() for name in names])
