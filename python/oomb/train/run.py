"""A run from its settings to its report."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from oomb.checkpoint import model_identity
from oomb.errors import Error
from oomb.hf import Interrupted, Trainer
from oomb.model.rope import positions
from oomb.monitor import Display, RunMonitor
from oomb.plan import write_plan
from oomb.report import write_report
from oomb.train.arguments import check_schedule, check_trackers, training_arguments
from oomb.train.data import Data, find_data, prepare_data, tokenising_rule
from oomb.train.errors import BadInput
from oomb.train.folder import MODEL_FOLDER, begin, check_data, check_folder
from oomb.train.model import device_of, load_config, load_model, load_tokenizer
from oomb.train.planning import finish, plan_run
from oomb.train.publish import check_hub, publish
from oomb.train.rope import check_positions
from oomb.train.samples import Samples, prompts_as_tokens
from oomb.train.sequences import collate
from oomb.train.settings import RunSettings


def train(
    settings: RunSettings,
    *,
    resume: bool = False,
    dry_run: bool = False,
    console: Console | None = None,
) -> int:
    """Carry out a run; see docs/train.md.

    Args:
        resume: go on from the newest intact checkpoint in the run's folder.
        dry_run: check settings, first rows, tokenizer and model config, print the plan and stop.

    Returns:
        Exit code: 0 when done, or interrupted with a checkpoint saved.

    Raises:
        BadInput: settings, files or model that the run cannot use; nothing was written.
        oomb.Error: the model cannot be run exactly, memory does not suffice, or no checkpoint is
            intact.
    """
    console = console or Console()
    check_folder(settings, resume)
    check_schedule(settings)
    check_trackers(settings)
    device_of(settings.model)
    sources = find_data(settings.data)
    config = load_config(settings.model)
    tokenizer = load_tokenizer(settings.model, config)
    rule = tokenising_rule(settings.data, tokenizer, config.get_text_config().vocab_size)
    written = settings.evaluation.generate
    prompts = (
        prompts_as_tokens(written, tokenizer, rule.rows.chat, positions(config)) if written else []
    )
    check_hub(settings.saving)
    if dry_run:
        sources.check_first_rows(rule)
        check_positions(config, settings.context)
        plan_run(settings, config, settings.context, console)
        return 0
    data = prepare_data(settings, sources, rule)
    identity = data.train.identity()
    check_data(settings, identity)
    check_positions(config, max(part.longest_document for part in data.parts))
    _describe(console, data)
    prediction = plan_run(settings, config, max(part.longest for part in data.parts), console)

    if not console.is_terminal:
        transformers.logging.disable_progress_bar()
    set_seed(settings.training.seed)
    model = load_model(settings.model, settings.lora, config)
    trainer = _build_trainer(settings, data, model, tokenizer)
    transformers.logging.disable_progress_bar()  # they would tear the run's own display
    run = begin(settings, identity)
    write_plan(run, prediction)
    every = settings.logging.chunk_records_every
    trainer.observer = RunMonitor(run, display=Display(console), chunk_records_every=every)
    if written is not None:
        trainer.add_callback(Samples(written, prompts, tokenizer, run, console))
    try:
        if resume and _load_finished(trainer, settings, len(data.train)):
            _say(console, "All steps are done already.")
        else:
            trainer.train(
                resume_from_checkpoint=resume and bool(trainer.checkpoint_store().steps())
            )
    except Interrupted:  # the trainer has said what it saved
        _say(console, "oomb train --resume goes on from there")
        return 0
    finally:
        trainer.engine.close()
    _save_model(trainer, run / MODEL_FOLDER)
    _say(console, f"Model:  {run / MODEL_FOLDER}")
    try:
        finish(run, prediction, settings.training.accumulation_steps, console)
        _say(console, f"Report: {write_report(run)}")
    except (OSError, ValueError) as error:  # the model is safe, whatever became of the records
        _say(console, f"No report: {error}")
    address = publish(settings.saving, run / MODEL_FOLDER)
    if address is not None:
        _say(console, f"Hub:    {address}")
    return 0


def _build_trainer(
    settings: RunSettings,
    data: Data,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Trainer:
    evaluates = data.eval is not None
    arguments = training_arguments(settings, device_of(settings.model), evaluates)
    with _unmade_on_error(Path(settings.output_dir)):
        try:
            trainer = Trainer(
                model=model,
                args=arguments,
                data_collator=collate,
                train_dataset=data.train,
                eval_dataset=data.eval,
                processing_class=tokenizer,
                callbacks=[_EvaluateAtEnd()] if evaluates else [],
                oomb_config=settings.engine.made(),
            )
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


def _load_finished(trainer: Trainer, settings: RunSettings, num_sequences: int) -> bool:
    """Load the last step's weights if that step is saved; the stock trainer would take one more."""
    training = settings.training
    calls = math.ceil(num_sequences / training.batch_size)
    per_epoch = math.ceil(calls / training.accumulation_steps)
    last = training.steps or math.ceil(training.epochs * per_epoch)
    newest = trainer.checkpoint_store().newest_intact(model_identity(trainer.model))
    if newest is None or newest.step < last:
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


def _save_model(trainer: Trainer, folder: Path) -> None:
    """The final weights, complete or not there at all.

    Raises:
        oomb.Error: they could not be written.
    """
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        trainer.save_model(str(unfinished))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise Error(
            f"the model was not saved in {folder}: {error}; the checkpoints are as they were, and "
            "oomb train --resume writes it from the last one"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _describe(console: Console, data: Data) -> None:
    for name, part in (("Data", data.train), ("Held out", data.eval)):
        if part is not None:
            number = len(part)
            _say(
                console,
                f"{name}: {part.num_tokens:,} tokens in {number:,} "
                f"sequence{'s' if number > 1 else ''} of {part.longest:,} at most"
                + ("" if part.num_targets is None else f", {part.num_targets:,} of them predicted"),
            )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
