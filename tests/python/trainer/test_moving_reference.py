"""A reference model that follows the trained one (TRL's ``sync_ref_model``) over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import oomb.hf
from engine.models import make
from oomb.checkpoint import CheckpointError

from .runs import CONFIG, logged, tokenizer
from .two_pass_runs import model, preferences, settings


def trainer(folder: Path, steps: int, **others: Any) -> Any:
    of_step = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.3}
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    args = trl.DPOConfig(
        **settings(folder, **of_step),
        per_device_train_batch_size=2,
        max_length=64,
        lr_scheduler_type="constant",
        **(moving | others),
    )
    torch.manual_seed(9)
    return oomb.hf.DPOTrainer(
        model=model(adapted=False),
        ref_model=make("qwen3"),
        args=args,
        train_dataset=preferences(),
        processing_class=tokenizer(),
        oomb_config=CONFIG,
    )


def test_a_resumed_run_has_the_reference_of_its_step(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    trainer(tmp_path / "parts", 2).train()
    resumed = trainer(tmp_path / "parts", 4)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    for mine, theirs in zip(
        resumed.ref_model.parameters(), whole.ref_model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_without_one_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, 2, sync_ref_model=False).train()
    with pytest.raises(CheckpointError, match="sync_ref_model: expected False"):
        trainer(tmp_path, 4).train(resume_from_checkpoint=True)
