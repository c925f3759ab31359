"""Checkpoints as tests write and read them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_example(folder: Path) -> None:
    """Weights, a config, a state with tensors and a subfolder: what a trainer writes."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer.{i}": torch.randn(16, 16, generator=generator) for i in range(3)}
    save_file(weights, folder / "model.safetensors")
    save_file(
        {"exp_avg": torch.randn(300, generator=generator)}, folder / "training-00001.safetensors"
    )
    (folder / "training.json").write_text(json.dumps({"step": list(range(200))}))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16}))
    (folder / "adapter").mkdir()
    save_file({"lora": torch.randn(8, 8, generator=generator)}, folder / "adapter/a.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
