"""What a checkpoint says of its step, and where a resumed or repeated run begins and ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerControl, TrainerState

import oomb
from oomb.hf import Interrupted, Trainer

from .runs import CONFIG, arguments, logged, model, packed


def trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    own = {"save_strategy": "steps", "save_steps": 2, **settings}
    return Trainer(
        model(),
        arguments(folder, **own),
        train_dataset=packed(),
        eval_dataset=packed(5, seed=4),
        oomb_config=CONFIG,
        callbacks=list(callbacks),
    )


class SavesAtEachStep(TrainerCallback):
    """Saves an epoch's last step before the epoch's end, where it is evaluated."""

    def on_step_end(self, _: Any, __: TrainerState, control: TrainerControl, **___: Any) -> None:
        control.should_save = True


class Weights(TrainerCallback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, _: Any, state: TrainerState, __: Any, **named: Any) -> None:
        weights = named["model"].named_parameters()
        self.after[state.global_step] = {name: one.detach().clone() for name, one in weights}


def trainer_state(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "trainer_state.json").read_text()))


def differs(path: Path, weights: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights that a checkpoint holds otherwise."""
    saved = load_file(path / "model.safetensors")
    return [name for name, one in saved.items() if not torch.equal(one, weights[name])]


def test_an_evaluation_after_the_save_of_its_step_is_in_the_checkpoint(tmp_path: Path) -> None:
    weights = Weights()
    run = trainer(
        tmp_path,
        weights,
        SavesAtEachStep(),
        max_steps=-1,
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that a step before the last is the best
    )
    run.train()
    evaluated = logged(run, "eval_loss")
    best = 3 * (1 + evaluated.index(max(evaluated)))
    assert best < run.state.global_step
    path = run.checkpoint_store().path_of(best)
    assert (run.state.best_global_step, run.state.best_model_checkpoint) == (best, str(path))
    assert differs(path, dict(run.model.named_parameters())) == []
    assert differs(path, weights.after[best]) == []
    for epoch, step in enumerate([3, 6, 9], start=1):
        history = trainer_state(run.checkpoint_store().path_of(step))["log_history"]
        assert [log["step"] for log in history if "eval_loss" in log] == [3, 6, 9][:epoch]
        assert [log["step"] for log in history if "loss" in log] == [3, 6, 9][:epoch]


@pytest.mark.parametrize("steps", [4, 6])  # in an epoch, and at the end of one
def test_a_finished_run_takes_no_step_when_it_is_resumed(steps: int, tmp_path: Path) -> None:
    settings = {"max_steps": steps, "lr_scheduler_type": "constant"}
    whole = trainer(tmp_path, **settings)
    whole.train()
    steps_saved = whole.checkpoint_store().steps()
    for _ in range(2):
        weights = Weights()
        resumed = trainer(tmp_path, weights, **settings)
        output = resumed.train(resume_from_checkpoint=True)
        assert (output.global_step, weights.after) == (steps, {})
        assert resumed.checkpoint_store().steps() == steps_saved
        assert logged(resumed, "loss") == logged(whole, "loss")
        for name, one in resumed.model.named_parameters():
            assert torch.equal(one, whole.model.get_parameter(name)), name


def test_a_finished_run_that_is_resumed_ends_with_its_best_model(tmp_path: Path) -> None:
    settings = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that a step before the last is the best
    }
    whole = trainer(tmp_path, **settings)
    whole.train()
    assert whole.state.best_global_step == 2
    resumed = trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    path = resumed.checkpoint_store().path_of(2)
    assert differs(path, dict(resumed.model.named_parameters())) == []


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_retry_with_a_smaller_batch_saves_its_own_steps(states: str, tmp_path: Path) -> None:
    weights = Weights()
    run = trainer(tmp_path, weights, auto_find_batch_size=True)
    run.optimizer_states = states  # type: ignore[assignment]
    own, failed = run.training_step, []

    def training_step(*given: Any, **named: Any) -> torch.Tensor:
        if run.state.global_step == 2 and not failed:
            failed.append(run._train_batch_size)
            raise oomb.OutOfMemoryError("tiers are full")
        return own(*given, **named)

    run.training_step = training_step  # type: ignore[method-assign]
    run.train()
    assert failed == [2] and run._train_batch_size == 1
    store = run.checkpoint_store()
    assert store.steps() == [2, 4, 6]
    for step in store.steps():
        assert differs(store.path_of(step), weights.after[step]) == []
        assert trainer_state(store.path_of(step))["train_batch_size"] == 1


@pytest.mark.parametrize("limit", [0, -1, None])
def test_no_limit_of_checkpoints(limit: int | None, tmp_path: Path) -> None:
    run = trainer(tmp_path, save_total_limit=limit, max_steps=4, save_steps=1)
    run.train()
    assert run.checkpoint_store().steps() == [1, 2, 3, 4]


class SignalInAnEvaluation(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_prediction_step(self, _: Any, state: TrainerState, __: Any, **___: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


# In an epoch; at the end of one, where the step was saved before; and at the end of training
@pytest.mark.parametrize(("step", "strategy"), [(2, "steps"), (3, "epoch"), (6, "steps")])
@pytest.mark.sampled(1)
def test_an_evaluation_that_a_signal_ended_is_made_when_resuming(
    step: int, strategy: str, tmp_path: Path
) -> None:
    settings = {
        "eval_strategy": strategy,
        "save_strategy": strategy,
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": step < 6,  # so that the step is the best
        "accelerator_config": {"use_seedable_sampler": False},
    }
    own = [SavesAtEachStep()] if strategy == "epoch" else []
    unbroken = trainer(tmp_path / "unbroken", *own, **settings)
    unbroken.train()
    assert unbroken.state.best_global_step == step
    broken = trainer(tmp_path / "broken", SignalInAnEvaluation(step), *own, **settings)
    with pytest.raises(Interrupted) as caught:
        broken.train()
    assert caught.value.step == step
    resumed = trainer(tmp_path / "broken", *own, **settings)
    resumed.train(resume_from_checkpoint=True)
    for name in ("loss", "eval_loss"):
        assert logged(resumed, name) == logged(unbroken, name)
    assert resumed.state.best_global_step == step
    for name, one in resumed.model.named_parameters():
        assert torch.equal(one, unbroken.model.get_parameter(name)), name
    again = trainer(tmp_path / "broken", *own, **settings)
    again.train(resume_from_checkpoint=True)
    assert logged(again, "eval_loss") == logged(unbroken, "eval_loss")  # made once
