"""Runs that go on with another batch size, accumulation or number of groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from engine.models import make
from oomb.checkpoint import CheckpointError
from oomb.hf.saved_training import layout_of_newest
from oomb.hf.step_layout import StepLayout, expect_same_order
from trainer.runs import logged

from .runs import STEPS, StopsAfter, trainer

SIX = {"network": lambda _: make("llama", torch.float64)}  # sequences a step: 2 x 3


def layout(batch_size: int, accumulation_steps: int, groups: int) -> StepLayout:
    return StepLayout(batch_size=batch_size, accumulation_steps=accumulation_steps, groups=groups)


def divided(batch: int, accumulation: int) -> dict[str, int]:
    return {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two sequences a call, three calls a step; epochs of 13 end at steps 3 and 6."""
    run = trainer(tmp_path_factory.mktemp("whole") / "run", **SIX)
    run.train()
    return run


@pytest.mark.parametrize(("step", "batch"), [(1, 1), (3, 6), (5, 3)])
def test_as_many_sequences_divided_otherwise(
    whole: Any, tmp_path: Path, step: int, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of an epoch, at its end, in the middle of the next."""
    resumed = trainer(tmp_path / "run", **SIX, **divided(batch, 6 // batch))
    logger = transformers.logging.get_logger("oomb.hf")
    logger.addHandler(caplog.handler)
    try:
        resumed.train(resume_from_checkpoint=str(whole.checkpoint_store().path_of(step)))
    finally:
        logger.removeHandler(caplog.handler)
    said = f"resumed with batch size {batch} x accumulation {6 // batch} x 1 group (batch size 2"
    assert said in caplog.text
    assert len(logged(resumed, "loss")) == STEPS
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-6)
    assert logged(resumed, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-11)
    assert resumed.state.train_batch_size == batch
    now = layout(7, 1, 1)
    assert layout_of_newest(tmp_path / "run", now) == layout(batch, 6 // batch, 1)
    damaged = resumed.checkpoint_store().path_of(STEPS) / "training.json"
    damaged.write_text('{"batch_size": 5}')
    assert layout_of_newest(tmp_path / "run", now) == now, "it says nothing"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            divided(2, 2),
            r"^gradient_accumulation_steps: expected 3, so that an optimizer step takes 6 sequences"
            r" as before \(batch size 2 x accumulation 3 x 1 group\), got 2, which makes 4 ",
        ),
        (divided(4, 2), "expected another batch size or number of groups, so that .* makes 8 "),
        (
            {**divided(1, 6), "train_sampling_strategy": "group_by_length"},
            "^train_sampling_strategy: expected 'random' or 'sequential' for a run that goes on",
        ),
        ({**divided(1, 6), "dataloader_drop_last": True}, "^dataloader_drop_last: expected False"),
    ],
)
def test_other_sequences_are_refused(
    whole: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    resumed = trainer(tmp_path / "run", **SIX, **settings)
    with pytest.raises(CheckpointError, match=message):
        resumed.train(resume_from_checkpoint=str(whole.checkpoint_store().path_of(1)))


def test_other_sequences_on_purpose(whole: Any, tmp_path: Path) -> None:
    """Where the place in the data is to be forgotten, as transformers has it."""
    resumed = trainer(
        tmp_path / "run",
        **SIX,
        **divided(1, 1),
        ignore_data_skip=True,
        callbacks=[StopsAfter(2)],
    )
    resumed.train(resume_from_checkpoint=str(whole.checkpoint_store().path_of(1)))
    assert resumed.state.global_step == 2


@pytest.mark.parametrize(
    ("seedable", "data", "name"),
    [
        (True, [1, 2], None),
        (False, [1, 2], "accelerator_config.use_seedable_sampler"),
        (True, SimpleNamespace(num_shards=1), None),
        (True, SimpleNamespace(num_shards=4), "train_dataset"),
    ],
)
def test_an_order_that_depends_on_groups(seedable: bool, data: Any, name: str | None) -> None:
    settings = SimpleNamespace(train_sampling_strategy="random", dataloader_drop_last=False)
    accelerator = SimpleNamespace(use_seedable_sampler=seedable)
    given = SimpleNamespace(args=settings, train_dataset=data, accelerator=accelerator)
    expect_same_order(given, layout(1, 4, 1), layout(2, 2, 1))  # within a group
    if name is None:
        expect_same_order(given, layout(1, 4, 1), layout(1, 2, 2))
        return
    with pytest.raises(CheckpointError, match=f"^{name}: expected .* 1 group .* 2 groups before"):
        expect_same_order(given, layout(1, 4, 1), layout(1, 2, 2))


def test_checkpoints_that_say_less() -> None:
    """Of before batch sizes were kept, and of before there were groups."""
    now = layout(3, 8, 1)
    assert now.before({"calls_per_step": 4, "replicas": 2}) == layout(3, 2, 2)
    assert now.before({}) == now
    assert now.before(now.as_state()) == now
