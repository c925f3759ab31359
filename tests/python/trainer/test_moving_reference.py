"""What steps of TRL's trainers change besides the model, over a resume: a reference that follows it
(``sync_ref_model``), the coefficient of ``use_adaptive_entropy``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import oomb.hf
from engine.models import make
from oomb.checkpoint import CheckpointError

from .runs import CONFIG, logged, prompts, tokenizer
from .two_pass_runs import model, preferences, reward, settings


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


def adaptive(folder: Path, steps: int) -> Any:
    of_step = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    args = trl.GRPOConfig(
        **settings(folder, gradient_accumulation_steps=1, **of_step),
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        use_adaptive_entropy=True,
        entropy_coef=0.0,
        entropy_coef_delta=0.05,
        entropy_coef_max=1.0,
        entropy_target=50.0,  # never reached, so that the coefficient rises
    )
    torch.manual_seed(0)
    return oomb.hf.GRPOTrainer(
        model=make("qwen3", torch.float32),
        args=args,
        train_dataset=prompts(8).select_columns(["prompt"]),
        reward_funcs=reward,
        processing_class=tokenizer(),
        oomb_config=CONFIG,
    )


def test_a_resumed_run_has_the_coefficient_of_its_step(tmp_path: Path) -> None:
    whole = adaptive(tmp_path / "whole", 4)
    whole.train()
    assert logged(whole, "entropy_coef") == pytest.approx([0.05, 0.1, 0.15, 0.2])
    adaptive(tmp_path / "parts", 2).train()
    resumed = adaptive(tmp_path / "parts", 4)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "entropy_coef") == logged(whole, "entropy_coef")
    assert logged(resumed, "loss") == logged(whole, "loss")
