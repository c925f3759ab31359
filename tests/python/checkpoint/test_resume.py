"""A resumed run takes the very steps of one without a break: losses equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from datasets import Dataset

import oomb
from oomb.checkpoint import CheckpointError
from oomb.hf import SFTTrainer, Trainer
from trainer.runs import CONFIG, arguments, logged, masked, model, packed, prompts, tokenizer

from .runs import STEPS, StopsAfter, disturb, trainer

SAMPLED = oomb.Config(chunk_size=32, page_size=16, backward=oomb.SampledChunks(keep=0.7))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 2}, id="adapters"),
        # the order of its epochs comes from the global generators
        pytest.param(
            {"train_sampling_strategy": "group_by_length", "oomb_config": SAMPLED},
            id="grouped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"accelerator_config": {"use_seedable_sampler": False}, "lr_scheduler_type": "cosine"},
            id="unseeded",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"network": lambda _: model(), "optim": "adafactor", "gradient_accumulation_steps": 2},
            id="full",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.sampled(2)
def test_from_a_step(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer(tmp_path / "run", **settings)
    whole.train()
    losses, norms = logged(whole, "loss"), logged(whole, "grad_norm")
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    assert whole.checkpoint_store().steps() == list(range(1, STEPS + 1))
    for step in (1, 3, 5):  # in the middle of an epoch, at its end, in the middle of the next
        disturb()
        resumed = trainer(tmp_path / f"from-{step}", seed=step, **settings)
        disturb()
        resumed.train(resume_from_checkpoint=str(whole.checkpoint_store().path_of(step)))
        assert logged(resumed, "loss") == losses, step
        assert logged(resumed, "grad_norm") == norms, step
        for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_a_break_in_every_step(tmp_path: Path) -> None:
    """Each process takes one step; the checkpoints are always those of the process before."""
    whole = trainer(tmp_path / "whole")
    whole.train()
    for step in range(1, STEPS + 1):
        piece = trainer(
            tmp_path / "pieces", seed=step - 1, save_total_limit=1, callbacks=[StopsAfter(step)]
        )
        if step > 1:
            disturb()
        piece.train(resume_from_checkpoint=True if step > 1 else None)
        assert piece.checkpoint_store().steps() == [step]
    assert logged(piece, "loss") == logged(whole, "loss")


def test_sft_trainer(tmp_path: Path) -> None:
    from trl import SFTConfig

    def make(folder: Path, callbacks: list[Any]) -> SFTTrainer:
        settings = SFTConfig(
            **{
                **arguments(folder, max_steps=5, save_strategy="steps", save_steps=1).to_dict(),
                "bf16": False,
                "packing": True,
                "max_length": 96,
            }
        )
        return SFTTrainer(
            model(),
            args=settings,
            train_dataset=prompts(),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj"]),
            callbacks=callbacks,
            oomb_config=CONFIG,
        )

    whole = make(tmp_path / "whole", [])
    whole.train()
    make(tmp_path / "parts", [StopsAfter(2)]).train()
    resumed = make(tmp_path / "parts", [])
    disturb()
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")


def streamed(folder: Path, number: int) -> Trainer:
    data = Dataset.from_list(packed(number)).to_iterable_dataset()
    settings = arguments(folder, max_steps=5, save_strategy="steps", save_steps=1)
    return Trainer(model(), settings, train_dataset=data, oomb_config=CONFIG)


def test_data_without_a_length(tmp_path: Path) -> None:
    whole = streamed(tmp_path / "run", number=40)
    whole.train()
    resumed = streamed(tmp_path / "resumed", number=40)
    resumed.train(resume_from_checkpoint=str(whole.checkpoint_store().path_of(3)))
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_data_without_a_length_read_twice(tmp_path: Path) -> None:
    """The stock trainer would go on from another place of it."""
    whole = streamed(tmp_path / "run", number=13)
    whole.train()
    path = whole.checkpoint_store().path_of(4)
    with pytest.raises(CheckpointError, match="^train_dataset: expected one with a length, got "):
        streamed(tmp_path / "resumed", number=13).train(resume_from_checkpoint=str(path))


def test_from_a_step_before_the_last(tmp_path: Path) -> None:
    """Only into another folder: two runs' checkpoints would be taken for one's."""
    run = trainer(tmp_path, callbacks=[StopsAfter(3)])
    run.train()
    path = run.checkpoint_store().path_of(2)
    message = (
        "^resume_from_checkpoint: expected the last one of .*, step-00000003, got step-00000002"
    )
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).train(resume_from_checkpoint=str(path))
    other = trainer(tmp_path / "other", callbacks=[StopsAfter(3)])
    other.train(resume_from_checkpoint=str(path))
    assert other.checkpoint_store().steps() == [3]


def test_the_best_model_is_kept_and_loaded(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        network=lambda _: model(),
        learning_rate=0.1,  # so that the first steps are best
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    run.train()
    evaluated = logged(run, "eval_loss")
    best = 1 + evaluated.index(min(evaluated))
    assert best < STEPS
    assert run.checkpoint_store().steps() == [best, STEPS]
    assert run.state.best_model_checkpoint == str(run.checkpoint_store().path_of(best))
    assert run.evaluate()["eval_loss"] == min(evaluated)


def test_the_schedule_of_a_shorter_epoch_and_padding(tmp_path: Path) -> None:
    """Epochs instead of steps; the last step of each has fewer micro-batches."""

    def make(callbacks: list[Any]) -> Trainer:
        settings = arguments(
            tmp_path, max_steps=-1, num_train_epochs=3, save_strategy="epoch", logging_steps=1
        )
        return Trainer(
            model(), settings, train_dataset=masked(), callbacks=callbacks, oomb_config=CONFIG
        )

    make([StopsAfter(3)]).train()
    resumed = make([])
    resumed.train(resume_from_checkpoint=True)
    steps = [log["step"] for log in resumed.state.log_history if "loss" in log]
    assert steps == list(range(1, 10))
    assert resumed.state.epoch == 3.0
    state = json.loads((resumed.checkpoint_store().path_of(9) / "trainer_state.json").read_text())
    assert state["global_step"] == 9


def test_a_full_disk_ends_the_run_with_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Trainer.save_model

    def save_model(self: Trainer, folder: str, **keywords: Any) -> None:
        if self.state.global_step == 3:
            raise OSError(28, "No space left on device")
        own(self, folder, **keywords)

    whole = trainer(tmp_path / "whole")
    whole.train()
    run = trainer(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_model", save_model)
        with pytest.raises(CheckpointError, match=r"step 3 was not saved .*No space left"):
            run.train()
    assert run.checkpoint_store().steps() == [1, 2]
    resumed = trainer(tmp_path / "run", seed=1)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")


def rates(run: Trainer) -> dict[int, float]:
    """Learning rate of each step that was logged."""
    logged = run.state.log_history
    return {entry["step"]: entry["learning_rate"] for entry in logged if "loss" in entry}


def test_settings_that_a_resumed_run_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are those of a run that had them from the start, and the log says which."""
    trainer(tmp_path, max_steps=3).train()
    changed = {"max_steps": 8, "learning_rate": 0.25, "weight_decay": 0.125, "adam_beta1": 0.5}
    resumed = trainer(tmp_path, **changed)
    logger = transformers.logging.get_logger("oomb.hf")
    logger.addHandler(caplog.handler)
    try:
        resumed.train(resume_from_checkpoint=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert "learning_rate 0.25 (0.003 before)" in caplog.text
    whole = trainer(tmp_path / "whole", **changed)
    whole.train()
    after = {step: rate for step, rate in rates(whole).items() if step > 3}
    assert after and {s: r for s, r in rates(resumed).items() if s > 3} == after
    groups = zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True)
    assert all({**group, "params": 0} == {**own, "params": 0} for group, own in groups)


def test_arguments_of_the_optimizer_may_change(tmp_path: Path) -> None:
    rates: dict[str, Any] = {"optim": "sgd", "save_steps": 1}
    trainer(tmp_path, max_steps=1, optim_args="momentum=0.9", **rates).train()
    changed = trainer(tmp_path, max_steps=2, optim_args="momentum=0.5", **rates)
    changed.train(resume_from_checkpoint=True)
    assert {group["momentum"] for group in changed.optimizer.param_groups} == {0.5}
    same = trainer(tmp_path, max_steps=3, optim_args="momentum=0.5", **rates)
    same.train(resume_from_checkpoint=True)
    assert {group["momentum"] for group in same.optimizer.param_groups} == {0.5}


def test_a_schedule_that_cannot_change(tmp_path: Path) -> None:
    plateau: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    trainer(tmp_path, max_steps=2, **plateau).train()
    trainer(tmp_path, max_steps=3, **plateau).train(resume_from_checkpoint=True)
    changed = trainer(tmp_path, max_steps=4, learning_rate=1.0, **plateau)
    with pytest.raises(CheckpointError, match=r"learning_rate: expected 0\.003.*ReduceLROnPlateau"):
        changed.train(resume_from_checkpoint=True)
    another = trainer(tmp_path, max_steps=4, lr_scheduler_type="linear", learning_rate=1.0)
    with pytest.raises(
        CheckpointError, match=r"lr_scheduler_type: .*what reduce_lr_on_plateau does"
    ):
        another.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ({"data_seed": 3}, {"data_seed": 4}, "data_seed: expected 3"),
        ({}, {"data_seed": 3}, "data_seed: expected None"),
        ({}, {"train_sampling_strategy": "sequential"}, "train_sampling_strategy: expected 'rand"),
        ({}, {"optim": "sgd"}, "optim: expected 'adamw_torch.*', as the run began, got 'sgd'"),
        ({}, {"optim": "adafactor"}, "optim: expected 'adamw_torch.*, which needs beta1, "),
        ({"optim": "sgd"}, {}, "optim: expected 'sgd', as .*, which needs amsgrad, betas"),
    ],
)
@pytest.mark.sampled(3)
def test_what_a_resumed_run_cannot_change(
    before: dict[str, Any], after: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """Rows would come twice, or states of one optimizer be taken for those of another."""
    trainer(tmp_path, max_steps=2, **before).train()
    with pytest.raises(CheckpointError, match=f"^{name}"):
        trainer(tmp_path, **after).train(resume_from_checkpoint=True)


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    resumed = trainer(tmp_path)
    resumed.args.seed = 43
    with pytest.raises(CheckpointError, match="^seed: expected 42, as the run began, got 43"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"data_seed": 1},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ],
)
def test_a_seed_that_orders_nothing_may_change(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", max_steps=3, seed=1, **settings)
    whole.train()
    trainer(tmp_path / "run", max_steps=3, seed=1, callbacks=[StopsAfter(2)], **settings).train()
    resumed = trainer(tmp_path / "run", max_steps=3, seed=4, **settings)
    resumed.args.seed = 4
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_another_order_may_be_asked_for(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    resumed = trainer(tmp_path, max_steps=3, data_seed=4, ignore_data_skip=True)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
