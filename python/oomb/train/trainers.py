"""The trainer of a run: ours for the next token, TRL's through the engine for its tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import oomb.hf
from oomb.checkpoint import model_identity
from oomb.hf import Trainer
from oomb.hf.saved_training import training_state
from oomb.parallel.job import Job
from oomb.train.arguments import engine_config, shards_weights
from oomb.train.data import Data
from oomb.train.errors import BadInput
from oomb.train.examples import Examples
from oomb.train.image_sequences import ImageSequences, collate_images
from oomb.train.model import load_by_first, load_model
from oomb.train.sequences import collate
from oomb.train.settings import RunSettings
from oomb.train.tasks import Task, holds_reference, reward_functions, task_of


def build_trainer(
    settings: RunSettings,
    arguments: TrainingArguments,
    data: Data,
    config: PreTrainedConfig,
    model: PreTrainedModel,
    processing: Any,
    job: Job,
) -> Trainer:
    """A trainer with its engine and optimizer.

    Args:
        processing: tokenizer, or processor, that is saved with the model.
        job: whose processes may share a reference's weights.

    Raises:
        BadInput: a setting that the trainer or the engine cannot honour.
    """
    task = task_of(settings)
    with _unmade_on_error(Path(settings.output_dir)):
        try:
            given: dict[str, Any] = {
                "model": model,
                "args": arguments,
                "processing_class": processing,
                "callbacks": [_EvaluateAtEnd()] if data.eval is not None else [],
                "oomb_config": engine_config(settings),
                "optimizer_states": settings.optimizer.states,
                "shard_weights": shards_weights(settings),
            }
            if task is None:
                sequences: dict[str, Any] = {"train_dataset": data.train, "eval_dataset": data.eval}
                joined = collate_images if isinstance(data.train, ImageSequences) else collate
                trainer = Trainer(**given, **sequences, data_collator=joined)
            else:
                given |= _of_task(settings, task, data, config, job)
                trainer = getattr(oomb.hf, task.trainer)(**given)
        except ValueError as error:  # names an argument that the engine cannot honour
            raise BadInput(str(error)) from error
        except OSError as error:  # the stock trainer makes the folder
            raise BadInput(
                f"output_dir: expected a folder that can be made, got {settings.output_dir}: "
                f"{error.strerror}"
            ) from error
        try:
            trainer.create_optimizer()
        except (ImportError, TypeError, ValueError) as error:
            name = settings.optimizer.name
            raise BadInput(
                f"optimizer.name: expected one that works here, got {name!r}: {error}"
            ) from error
    trainer.context = settings.context
    # The run's own display says what this would print between its lines.
    trainer.remove_callback(PrinterCallback)
    return trainer


def _of_task(
    settings: RunSettings, task: Task, data: Data, config: PreTrainedConfig, job: Job
) -> dict[str, Any]:
    """What a trainer of TRL is given besides."""
    given: dict[str, Any] = {}
    for name, part in (("train_dataset", data.train), ("eval_dataset", data.eval)):
        given[name] = part.dataset if isinstance(part, Examples) else None
    if task.generates:
        given["reward_funcs"] = reward_functions(settings)
    if task.reference and holds_reference(settings):
        if shards_weights(settings):
            given["ref_model"] = load_by_first(settings.model, None, config, job)
        else:
            weights = settings.engine.made().weights
            given["ref_model"] = load_model(settings.model, None, config, weights)
    return given


def load_finished(trainer: Trainer, settings: RunSettings, num_sequences: int) -> bool:
    """Load the last step's weights if that step is saved, and evaluated where it is to be: nothing
    is left to train or record.
    """
    training = settings.training
    if task_of(settings) is not None:  # TRL's samplers may give an example several times
        calls = len(trainer.get_train_dataloader())
    else:
        calls = math.ceil(num_sequences / training.batch_size / trainer.replicas.number)
    per_epoch = math.ceil(calls / training.accumulation_steps)
    last = training.steps or math.ceil(training.epochs * per_epoch)
    store, identity = trainer.checkpoint_store(), model_identity(trainer.model)
    newest = trainer.job.by_first(lambda: store.newest_intact(identity))
    if newest is None or newest.step < last:
        return False
    due = trainer.job.by_first(lambda: training_state(newest.path).get("evaluation_is_due", False))
    if due and trainer.eval_dataset is not None:
        return False
    trainer._load_from_checkpoint(str(newest.path))
    return True


class _EvaluateAtEnd(TrainerCallback):
    """The last step is evaluated, whether or not it is one of every so many."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


@contextmanager
def _unmade_on_error(folder: Path) -> Iterator[None]:
    """A Trainer makes its folder before the engine has accepted the model."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):
                folder.rmdir()
        raise
