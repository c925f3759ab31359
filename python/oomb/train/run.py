"""A run from its settings to its report."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from oomb.errors import Error
from oomb.hf import Interrupted, Trainer
from oomb.hf.one_gpu import use_one_gpu
from oomb.hf.refusals import refuse_arguments
from oomb.model.rope import positions
from oomb.monitor import Display, RunMonitor
from oomb.parallel.failure import raise_alike
from oomb.parallel.job import Job, begun, is_first
from oomb.plan import Prediction
from oomb.report import write_report
from oomb.train.arguments import (
    Holding,
    check_schedule,
    check_trackers,
    decided,
    shards_weights,
    sharing_ranks,
    training_arguments,
)
from oomb.train.chat import ChatTemplate
from oomb.train.data import Data, Part, find_data, prepare_data, tokenising_rule
from oomb.train.errors import BadInput
from oomb.train.examples import ExampleRule, check_first_examples
from oomb.train.folder import MODEL_FOLDER, begin, check_data, check_folder
from oomb.train.image_examples import ImageRule
from oomb.train.image_runs import on_images
from oomb.train.image_sequences import ImageSequences
from oomb.train.model import (
    device_of,
    load_by_first,
    load_config,
    load_model,
    load_processor,
    load_tokenizer,
)
from oomb.train.planning import finish, plan_run
from oomb.train.processor import Processing
from oomb.train.publish import check_hub, publish
from oomb.train.rope import check_positions
from oomb.train.samples import Samples, prompts_as_tokens
from oomb.train.sequences import SequenceDataset
from oomb.train.settings import RunSettings
from oomb.train.tasks import Task, reward_functions, task_of
from oomb.train.trainers import build_trainer, load_finished

raise_alike(BadInput, BadInput)


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
    device = device_of(settings.model)
    console = console or Console(quiet=not is_first())
    with begun(device.type):
        job = Job()
        with job.whole_or_ended(_say_last):
            ready = job.in_turns(lambda: _read(settings, resume=resume, dry_run=dry_run))
            if ready.data is not None:
                _carry_out(settings, ready, ready.data, job, resume=resume, console=console)
            else:
                shown = settings.context if ready.processor is not None else None
                job.by_first(
                    lambda: plan_run(
                        settings, ready.config, settings.context, console, most_shown=shown
                    )
                )
        job.close()
    return 0


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What a run begins with; ``data`` is None for a dry run, ``processor`` without images."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    processor: Any
    prompts: list[list[int]]
    data: Data | None


def _read(settings: RunSettings, *, resume: bool, dry_run: bool) -> _Ready:
    """Check all there is to check, and tokenise."""
    check_folder(settings, resume)
    check_schedule(settings)
    check_trackers(settings)
    sharing_ranks(settings)
    sources = find_data(settings.data)
    config = load_config(settings.model)
    processor: Any = None
    if on_images(settings, config, [*sources.train, *sources.eval]):
        processor = load_processor(settings.model, config)
        tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    else:
        tokenizer = load_tokenizer(settings.model, config)
    task = task_of(settings)
    told = settings.data
    if task is not None or processor is not None:  # TRL or the chat template ends a text
        told = told.model_copy(update={"add_eos": False})
    rule = tokenising_rule(told, tokenizer, config.get_text_config().vocab_size)
    written = settings.evaluation.generate
    if written and settings.engine.made().weights == "host":
        raise BadInput(
            "evaluation.generate: expected none beside engine.weights 'host', got prompts; between "
            "calls the model has its weights on the host and cannot write"
        )
    prompts = (
        prompts_as_tokens(written, tokenizer, rule.rows.chat, positions(config)) if written else []
    )
    check_hub(settings.saving)
    examples = None if task is None else _examples(settings, task, tokenizer, rule.rows.chat)
    read = rule if processor is None else ImageRule(rule.rows, Processing(processor))
    data: Data | None = None
    if processor is not None or (dry_run and examples is None):
        sources.check_first_rows(read)
    if dry_run:
        if examples is not None:
            check_first_examples([*sources.train, *sources.eval], examples)
        check_positions(config, settings.context)
    else:
        data = prepare_data(settings, sources, read, examples)
        check_data(settings, data.train.identity())
        check_positions(config, max(part.longest_document for part in data.parts))
    return _Ready(
        config=config, tokenizer=tokenizer, processor=processor, prompts=prompts, data=data
    )


def _examples(
    settings: RunSettings,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatTemplate | None,
) -> ExampleRule:
    """The rule of a task's examples; options and reward functions are looked at too."""
    arguments = training_arguments(settings, device_of(settings.model), evaluates=False)
    use_one_gpu(arguments)
    try:
        refuse_arguments({"args": arguments})
    except ValueError as error:
        raise BadInput(f"trl.{error}") from error
    reward_functions(settings)
    if chat is not None:
        tokenizer.chat_template = chat.template
    if tokenizer.pad_token is None:  # padding is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if tokenizer.eos_token is None and task.generates:  # TRL's generation must end with one
        tokenizer.eos_token = tokenizer.pad_token
    return ExampleRule(task, settings, tokenizer)


def _carry_out(
    settings: RunSettings,
    ready: _Ready,
    data: Data,
    job: Job,
    *,
    resume: bool,
    console: Console,
) -> None:
    _describe(console, data)
    longest = max(part.longest for part in data.parts)
    images = [part.most_shown for part in data.parts if isinstance(part, ImageSequences)]
    prediction = job.by_first(
        lambda: plan_run(
            settings, ready.config, longest, console, most_shown=max(images, default=None)
        )
    )

    if not console.is_terminal:
        transformers.logging.disable_progress_bar()
    set_seed(settings.training.seed)
    chosen = Holding(prediction.machine.weights, prediction.config.main_grad_device)
    placed = decided(settings, chosen)
    lora, scores = settings.lora, settings.task == "reward"
    if shards_weights(placed):
        # TRL keeps an adapter's beginning.
        copied = lora is not None and settings.task not in ("sft", "reward")
        model = load_by_first(
            settings.model,
            lora,
            ready.config,
            job,
            copied=copied,
            scores=scores,
            images=bool(images),
        )
    else:
        weights = settings.engine.made().weights
        model = load_model(
            settings.model, lora, ready.config, weights, scores=scores, images=bool(images)
        )
    arguments = training_arguments(settings, device_of(settings.model), data.eval is not None)
    told = use_one_gpu(arguments)
    if told is not None:
        _say(console, told)
    processing = ready.tokenizer if ready.processor is None else ready.processor
    trainer = build_trainer(placed, arguments, data, ready.config, model, processing, job)
    transformers.logging.disable_progress_bar()  # they would tear the run's own display
    run = Path(settings.output_dir)
    if job.is_first:
        begin(settings, data.train.identity(), prediction)
        every = settings.logging.chunk_records_every
        trainer.observer = RunMonitor(run, display=Display(console), chunk_records_every=every)
        written = settings.evaluation.generate
        if written is not None:
            samples = Samples(written, ready.prompts, ready.tokenizer, run, console)
            trainer.add_callback(samples)
    try:
        if resume and load_finished(trainer, settings, len(data.train)):
            _say(console, "All steps are done already.")
        else:
            saved = job.by_first(lambda: bool(trainer.checkpoint_store().steps()))
            trainer.train(resume_from_checkpoint=resume and saved)
    except Interrupted:  # the trainer has said what it saved
        _say(console, "oomb train --resume goes on from there")
        return
    finally:
        trainer.engine.close()
    with trainer.whole_weights():
        job.by_first(lambda: _leave_behind(settings, trainer, run, prediction, console))


def _leave_behind(
    settings: RunSettings, trainer: Trainer, run: Path, prediction: Prediction, console: Console
) -> None:
    """The final model, the report, and the model on the hub."""
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
                + ("" if part.num_targets is None else f", {part.num_targets:,} of them predicted")
                + (f", {part.num_images:,} images" if isinstance(part, ImageSequences) else "")
                + _left_out(part),
            )


def _left_out(part: Part) -> str:
    number = 0 if isinstance(part, SequenceDataset) else part.left_out
    return f"; {number:,} examples longer than the context are left out" if number else ""


def _say_last(text: str) -> None:
    _say(Console(stderr=True), f"oomb train: {text}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
