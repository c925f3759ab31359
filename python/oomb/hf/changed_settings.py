"""What a resumed run has changed about its data's order, its optimizer and its schedule.

A checkpoint holds the last two with the settings they were made with, and loading them brings those
back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from oomb.checkpoint import CheckpointError

ARGUMENTS_FILE = "training_args.json"

_RATE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs")
_LENGTH = ("warmup_steps", "max_steps", "num_train_epochs")
# Argument of the trainer: what an optimizer's parameter groups call it.
_OF_GROUPS = {
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}
_OF_OPTIMIZER = "optim_args"  # whatever else the groups of one have
_OF_SCHEDULE = ("params", "lr", "initial_lr")  # of a group: its own


def arguments_as_json(arguments: TrainingArguments) -> str:
    """Arguments as a checkpoint keeps them."""
    return json.dumps(arguments.to_dict(), indent=2, default=str)


class ChangedSettings:
    """Settings in which a run and the checkpoint it goes on from differ.

    Attributes:
        values: name of an argument: (before, now). Empty where the run is the same.
    """

    def __init__(self, checkpoint: Path, arguments: TrainingArguments) -> None:
        self.values: dict[str, tuple[Any, Any]] = {}
        self._before: dict[str, Any] = {}
        self._now: dict[str, Any] = json.loads(arguments_as_json(arguments))
        file = checkpoint / ARGUMENTS_FILE
        if not file.exists():
            return
        self._before = json.loads(file.read_text())
        for name in (*_RATE, *_LENGTH, *_OF_GROUPS, _OF_OPTIMIZER):
            if self._differs(name):
                self.values[name] = (self._before[name], self._now[name])

    def __str__(self) -> str:
        return ", ".join(f"{name} {now} ({was} before)" for name, (was, now) in self.values.items())

    def _differs(self, name: str) -> bool:
        return name in self._before and self._before[name] != self._now[name]

    def expect_same_order(self, *, seeded: bool) -> None:
        """Refuse settings by which the rest of an epoch is not what is left of it.

        Args:
            seeded: a seed says the random order of an epoch, not the generators' state.

        Raises:
            CheckpointError: names the setting.
        """
        wrong = None
        if self._differs("train_sampling_strategy"):
            wrong = "train_sampling_strategy"
        elif seeded and self._now["train_sampling_strategy"] == "random":
            if self._differs("data_seed"):
                wrong = "data_seed"
            elif self._differs("seed") and self._now["data_seed"] is None:
                wrong = "seed"
        if wrong is not None:
            raise CheckpointError(
                f"{wrong}: expected {self._before[wrong]!r}, as the run began, got "
                f"{self._now[wrong]!r}: rows would come in another order, some twice and some not; "
                "ignore_data_skip=True begins the epoch anew"
            )

    def load(self, optimizer: Any, schedule: Any, state: dict[str, Any]) -> None:
        """Load both from a checkpoint's state, and keep of the run's own what it has changed.

        Raises:
            CheckpointError: another optimizer, which cannot take the states over, or another rate
                of a schedule that depends on what came before.
        """
        lacking = set(optimizer.param_groups[0]) - set(state["optimizer"]["param_groups"][0])
        # A later torch may add one to the same optimizer, and says itself what it stands for.
        if lacking and self._differs("optim"):
            raise CheckpointError(
                f"optim: expected {self._before['optim']!r}, as the run began, got "
                f"{self._now['optim']!r}, which needs {', '.join(sorted(lacking))}"
            )
        fresh = [dict(group) for group in optimizer.param_groups]
        own_rates = list(getattr(schedule, "base_lrs", []))
        optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(optimizer.param_groups, fresh, strict=True):
            for argument, key in _OF_GROUPS.items():
                if argument in self.values and key in own:
                    group[key] = own[key]
            if _OF_OPTIMIZER in self.values:
                group.update({key: own[key] for key in own if key not in _OF_SCHEDULE})
        of_schedule = [name for name in (*_RATE, *_LENGTH) if name in self.values]
        if not of_schedule:
            schedule.load_state_dict(state["scheduler"])
        elif isinstance(schedule, LambdaLR) and "base_lrs" in state["scheduler"]:
            _continue_at(schedule, state["scheduler"]["last_epoch"], own_rates, optimizer)
        else:  # what goes by results counts those, not steps
            of_rate = [name for name in of_schedule if name in _RATE]
            if of_rate:
                name = "lr_scheduler_type" if "lr_scheduler_type" in of_rate else of_rate[0]
                was, now = self.values[name]
                kind = was if isinstance(schedule, LambdaLR) else type(schedule).__name__
                raise CheckpointError(
                    f"{name}: expected {was!r}, as the run began, got {now!r}: what {kind} does "
                    "depends on the steps before"
                )
            schedule.load_state_dict(state["scheduler"])


def _continue_at(schedule: LambdaLR, step: int, rates: list[float], optimizer: Any) -> None:
    """The rates that ``schedule`` has after ``step`` steps, as if it had been this one always."""
    functions: list[Callable[[int], float]] = schedule.lr_lambdas
    now = [rate * function(step) for rate, function in zip(rates, functions, strict=True)]
    schedule.last_epoch = step
    schedule._step_count = step + 1
    schedule.base_lrs = list[Any](rates)
    schedule._last_lr = list[Any](now)
    for group, first, rate in zip(optimizer.param_groups, rates, now, strict=True):
        group["initial_lr"] = first
        if isinstance(group["lr"], torch.Tensor):  # torchao's stay tensors
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
