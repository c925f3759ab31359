"""Runs of a small adapted model that stop, and resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import TrainerCallback

from oomb.hf import Trainer
from trainer.runs import CONFIG, arguments, model, packed

STEPS = 7  # 13 sequences in steps of 6: epochs end at 3 and 6


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def adapted(seed: int) -> Any:
    """Adapters with dropout, so that the losses depend on torch's generator."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_dropout": 0.3, "target_modules": ["q_proj", "v_proj"]}
    return peft.get_peft_model(model(), peft.LoraConfig(**settings))


def trainer(folder: Path, seed: int = 0, **settings: Any) -> Trainer:
    config = settings.pop("oomb_config", CONFIG)
    network = settings.pop("network", adapted)
    callbacks = settings.pop("callbacks", [])
    own = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, **settings}
    return Trainer(
        network(seed),
        arguments(folder, **own),
        train_dataset=packed(),
        eval_dataset=packed(3),
        callbacks=callbacks,
        oomb_config=config,
    )


def disturb() -> None:
    """A new process draws other numbers before it resumes."""
    torch.rand(17)
    random.random()
    np.random.rand(3)  # noqa: NPY002
