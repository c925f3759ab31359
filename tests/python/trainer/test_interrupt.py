"""SIGTERM and SIGINT end training at the next chunk border, with the last finished step saved."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

import oomb
from oomb.hf import Interrupted, Trainer

from .runs import CONFIG, arguments, logged, model, packed


class Signals:
    """An observer that sends signals to its own process at one progress report."""

    def __init__(self, step: int, report: int, numbers: list[signal.Signals]) -> None:
        self._when = (step, report)
        self._numbers = numbers
        self.reports: dict[int, int] = {}
        self.ends: list[dict[str, Any]] = []

    def on_progress(self, step: int, progress: oomb.Progress) -> None:
        self.reports[step] = self.reports.get(step, 0) + 1
        if (step, self.reports[step]) == self._when:
            for number in self._numbers:
                os.kill(os.getpid(), number)

    def on_end(self, record: dict[str, Any]) -> None:
        self.ends.append(record)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def trainer(folder: Path, observer: Any = None, **settings: Any) -> Trainer:
    own = {"save_strategy": "steps", "save_steps": 2, **settings}
    callbacks = own.pop("callbacks", [])
    return Trainer(
        model(),
        arguments(folder, **own),
        train_dataset=packed(),
        eval_dataset=packed(5),
        oomb_config=CONFIG,
        observer=observer,
        callbacks=callbacks,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without a break."""
    run = trainer(tmp_path_factory.mktemp("whole"))
    run.train()
    return logged(run, "loss")


# 15 reports a step: 3 micro-batches of 2 filled and 3 swept chunks; every third step has 5
@pytest.mark.parametrize(
    ("number", "step", "report"),
    [
        (signal.SIGTERM, 1, 1),
        (signal.SIGINT, 4, 8),
        pytest.param(signal.SIGTERM, 2, 15, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 5, 10, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 6, 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_at_a_chunk(
    step: int, report: int, number: signal.Signals, whole: list[float], tmp_path: Path
) -> None:
    watched = Signals(step, report, [number])
    before = signal.getsignal(number)
    run = trainer(tmp_path, watched)
    with pytest.raises(Interrupted) as caught:
        run.train()
    interrupted = caught.value
    assert isinstance(interrupted, SystemExit) and interrupted.code == 0
    path = run.checkpoint_store().path_of(step - 1)
    assert (interrupted.reason, interrupted.step, interrupted.checkpoint) == (
        number.name,
        step - 1,
        path,
    )
    assert str(interrupted) == (
        f"{number.name}: the step under way was abandoned; step {step - 1}, the last finished "
        f"one, is saved in {path}"
    )
    assert watched.reports[step] == report  # nothing ran after the border
    assert [record["reason"] for record in watched.ends] == [number.name]
    assert signal.getsignal(number) == before
    assert all(p.grad is None or not p.grad.any() for p in run.model.parameters())
    # Another process may go on, or the same one
    torch.rand(9)
    other = trainer(tmp_path / "other")
    other.train(resume_from_checkpoint=str(path))
    run.observer = None
    run.train(resume_from_checkpoint=True)
    assert logged(other, "loss") == logged(run, "loss") == whole


def test_in_an_evaluation(whole: list[float], tmp_path: Path) -> None:
    class AtEvaluation(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}
    run = trainer(tmp_path, callbacks=[AtEvaluation()], **settings)
    with pytest.raises(Interrupted) as caught:
        run.train()
    assert caught.value.step == 3 and caught.value.checkpoint is not None
    resumed = trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == whole


def test_inside_a_call_of_an_evaluation(tmp_path: Path) -> None:
    """At its next chunk border, not at its end."""
    run = trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    chunks = []

    def hook(layer: nn.Module, *_: object) -> None:
        if not layer.training:
            chunks.append(1)
            if len(chunks) == 5:  # of 3 in each micro-batch
                os.kill(os.getpid(), signal.SIGTERM)

    run.model.model.layers[0].register_forward_hook(hook)
    with pytest.raises(Interrupted):
        run.train()
    assert len(chunks) == 5


def test_in_the_middle_of_accumulation(tmp_path: Path) -> None:
    """What the abandoned micro-batches drew (dropout, chunks) is drawn again."""

    def make(observer: Any = None) -> Trainer:
        torch.manual_seed(0)
        adapters = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"])
        return Trainer(
            get_peft_model(model(), adapters),
            arguments(tmp_path / str(observer is None), save_strategy="steps", save_steps=10),
            train_dataset=packed(),
            oomb_config=replace(CONFIG, backward=oomb.SampledChunks(keep=0.9)),
            observer=observer,
        )

    unbroken = make()
    unbroken.train()
    broken = make(Signals(4, 8, [signal.SIGTERM]))
    with pytest.raises(Interrupted):
        broken.train()
    assert broken.engine.state_dict()["step"] > 3 * 3 - 2  # micro-batches of step 4 were done
    resumed = make(Signals(0, 0, []))
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(unbroken, "loss")


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_before_the_first_step_of_a_resumed_run(step: int, tmp_path: Path) -> None:
    """Resumed into another folder, a step on, in the middle of an epoch whose order the global
    generators drew: what is saved is as good as what was loaded."""
    settings = {"accelerator_config": {"use_seedable_sampler": False}, "save_steps": 1}
    unbroken = trainer(tmp_path / "a", **settings)
    unbroken.train()
    path = unbroken.checkpoint_store().path_of(step)
    torch.rand(5)
    broken = trainer(tmp_path / "b", Signals(step + 1, 3, [signal.SIGTERM]), **settings)
    torch.rand(5)
    with pytest.raises(Interrupted) as caught:
        broken.train(resume_from_checkpoint=str(path))
    assert caught.value.checkpoint == broken.checkpoint_store().path_of(step)
    resumed = trainer(tmp_path / "b", **settings)
    torch.rand(5)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(unbroken, "loss")


def test_while_saving(whole: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is finished, and not made twice."""
    saves = []
    own = Trainer.save_model

    def save_model(self: Trainer, *given: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saves.append(self.state.global_step)
        own(self, *given, **named)

    run = trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_model", save_model)
        with pytest.raises(Interrupted):
            run.train()
    assert saves == [2] and run.checkpoint_store().steps() == [2]
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == whole


def test_after_the_last_step(tmp_path: Path) -> None:
    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    run = trainer(tmp_path, callbacks=[AtTheEnd()])
    with pytest.raises(Interrupted) as caught:
        run.train()
    assert caught.value.step == 6
    assert run.checkpoint_store().steps() == [2, 4, 6]


def test_nothing_is_saved_where_saving_is_off(tmp_path: Path) -> None:
    run = trainer(tmp_path, Signals(3, 1, [signal.SIGTERM]), save_strategy="no")
    with pytest.raises(Interrupted, match=r"step 2, the last finished one, is not saved$"):
        run.train()
    assert not run.checkpoint_store().folder.exists()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    watched = Signals(2, 3, [signal.SIGINT, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, watched).train()
    assert watched.ends == [{"reason": "error", "seconds": watched.ends[0]["seconds"]}]


def test_data_loader_processes_do_not_keep_the_signal(tmp_path: Path) -> None:
    run = trainer(tmp_path, Signals(2, 2, [signal.SIGTERM]), dataloader_num_workers=1)
    with pytest.raises(Interrupted):
        run.train()
    assert run.checkpoint_store().steps() == [1]
