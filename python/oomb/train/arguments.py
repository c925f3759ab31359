"""Settings as transformers' TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from oomb.config import Config
from oomb.hf.sharded import ELEMENTWISE
from oomb.nearest import nearest
from oomb.parallel.job import ranks_in_job
from oomb.plan.machine import HELD
from oomb.train.errors import BadInput
from oomb.train.model import device_of
from oomb.train.settings import RunSettings
from oomb.train.tasks import Task, arguments_kind, checked_options, task_of

# Transformers saves nothing, not even on a signal, where saving is off altogether.
_NEVER = 1 << 40


@dataclass(frozen=True)
class Holding:
    """Where a run's processes hold what is as large as the model.

    Attributes:
        weights: as ``parallel.weights`` names it, but ``auto``.
        sums: of gradients, as ``engine.main_grad_device`` does.
    """

    weights: str
    sums: str


def training_arguments(
    settings: RunSettings, device: torch.device, evaluates: bool
) -> TrainingArguments:
    """Arguments of the run's trainer, TRL's for its tasks. Writes nothing.

    Raises:
        BadInput: transformers or TRL refuses a combination; the text is its own.
    """
    task, kind, of_task = task_of(settings), TrainingArguments, {}
    if task is not None:
        kind, of_task = arguments_kind(task), checked_options(settings, task)
        # Examples that are longer have been left out, so TRL cuts none.
        of_task |= {} if task.generates else {"max_length": settings.context}
        of_task |= {"gradient_checkpointing": False}
    layout = _layout(settings, task)
    training, optimizer, schedule = settings.training, settings.optimizer, settings.schedule
    every = settings.evaluation.every_steps if evaluates else None
    named = ", ".join(f"{name}={value}" for name, value in optimizer.arguments.items())
    try:
        return kind(
            output_dir=settings.output_dir,
            max_steps=training.steps if training.steps is not None else -1,
            num_train_epochs=training.epochs,
            per_device_train_batch_size=training.batch_size,
            per_device_eval_batch_size=settings.evaluation.batch_size,
            gradient_accumulation_steps=training.accumulation_steps,
            max_grad_norm=training.max_grad_norm,
            bf16=training.autocast == "bfloat16",
            seed=training.seed,
            optim=optimizer.name,
            optim_args=named or None,
            learning_rate=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.epsilon,
            lr_scheduler_type=schedule.name,
            lr_scheduler_kwargs=dict(schedule.arguments) or None,
            warmup_steps=schedule.warmup_steps,
            eval_strategy="no" if every is None else "steps",
            eval_steps=every,
            eval_on_start=evaluates and settings.evaluation.at_start,
            save_strategy="steps",
            save_steps=settings.saving.every_steps or _NEVER,
            save_total_limit=settings.saving.keep_last,
            logging_steps=settings.logging.every_steps,
            report_to=settings.logging.report_to or "none",
            disable_tqdm=True,  # the run's own display says more
            prediction_loss_only=True,
            use_cpu=device.type == "cpu",
            parallelism_config=layout,
            remove_unused_columns=False,
            **of_task,
        )
    except (ImportError, TypeError, ValueError) as error:
        library = "transformers takes" if task is None else "TRL takes"
        raise BadInput(f"training: expected settings that {library}, got: {error}") from error


def _layout(settings: RunSettings, task: Task | None) -> Any:
    """What the arguments are told of :func:`sharing_ranks`."""
    layout = sharing_ranks(settings)
    if layout is None or task is None or not task.generates:
        return layout
    # TRL's own arguments refuse a cp_size; who is left over by the groups shares.
    return None if layout.dp_shard_size == 1 else replace(layout, cp_size=1)


def sharing_ranks(settings: RunSettings) -> Any:
    """An accelerate ParallelismConfig: how many processes share a sequence; None: there is one.

    Raises:
        BadInput: not so many as asked for, or weights are to be sharded by another field.
    """
    policy = settings.engine.made().sharded_weights
    if policy != Config().sharded_weights:
        raise BadInput(
            f"engine.sharded_weights: expected none, got '{policy}': say parallel.weights="
            f"{policy}, which shards the model too"
        )
    _expect_no_other_place(settings)
    ranks, asked = ranks_in_job(), settings.parallel.cp
    sharing = ranks if asked is None else asked
    if ranks % sharing:
        raise BadInput(
            f"parallel.cp: expected a divisor of the {ranks} process{'es' if ranks > 1 else ''} "
            f"that were started, got {sharing}"
        )
    if ranks == 1:
        return None
    from accelerate.parallelism_config import ParallelismConfig  # not in every accelerate

    return ParallelismConfig(cp_size=sharing, dp_shard_size=ranks // sharing)


def _expect_no_other_place(settings: RunSettings) -> None:
    policy = settings.parallel.weights
    hindrance = _hindrance_to_shards(settings)
    if policy not in ("auto", "replicated") and hindrance is not None:
        name, wanted, got = hindrance
        raise BadInput(f"{name}: expected {wanted} beside parallel.weights {policy!r}, got {got}")
    if policy == "zero1" and settings.engine.main_grad_device == "host":
        raise BadInput(
            "engine.main_grad_device: expected 'device' or 'auto' beside parallel.weights 'zero1', "
            "whose sums are whole until a call ends, got 'host'; take 'zero2'"
        )


def _hindrance_to_shards(settings: RunSettings) -> tuple[str, str, str] | None:
    """A setting that does not go with shared weights: its name, what goes, what it is."""
    engine, optimizer = settings.engine.made(), settings.optimizer.name
    if optimizer not in ELEMENTWISE:
        return "optimizer.name", f"one of {', '.join(ELEMENTWISE)}", repr(optimizer)
    for name, value, expected in (
        ("engine.weights", engine.weights, "device"),
        ("optimizer.states", settings.optimizer.states, "device"),
        ("model.quantization", settings.model.quantization, None),
        ("evaluation.generate", settings.evaluation.generate, None),
    ):
        if value != expected:
            wanted = "none" if expected is None else repr(expected)
            return name, wanted, repr(value) if isinstance(value, str) else "some"
    return None


def holdings_to_try(settings: RunSettings) -> tuple[Holding, ...]:
    """What ``auto`` may come to, the fastest first."""
    policy, sharing = settings.parallel.weights, sharing_ranks(settings)
    place = settings.engine.main_grad_device
    alone = sharing is None or sharing.cp_size == 1 or _hindrance_to_shards(settings) is not None
    policies = (policy,) if policy != "auto" else HELD[:1] if alone else HELD
    found = [Holding(each, "device" if place == "auto" else place) for each in policies]
    # On a CPU both are one memory.
    if place == "auto" and device_of(settings.model).type == "cuda":
        found += [Holding(each, "host") for each in policies]
    # Sums that are whole until a call ends stay on the device.
    return tuple(one for one in found if one != Holding("zero1", "host"))


def decided(settings: RunSettings, holding: Holding) -> RunSettings:
    """The settings with what ``auto`` has come to."""
    parallel = settings.parallel.model_copy(update={"weights": holding.weights})
    engine = settings.engine.model_copy(update={"main_grad_device": holding.sums})
    return settings.model_copy(update={"parallel": parallel, "engine": engine})


def shards_weights(settings: RunSettings) -> bool:
    """Whether several processes share weights; ``auto`` has been decided."""
    assert settings.parallel.weights != "auto"
    sharing = sharing_ranks(settings)
    return settings.parallel.weights != "replicated" and sharing is not None and sharing.cp_size > 1


def engine_config(settings: RunSettings) -> Config:
    """The engine's settings, with how weights are shared."""
    config = settings.engine.made()
    policy: Any = settings.parallel.weights
    return config if policy == "replicated" else replace(config, sharded_weights=policy)


def check_schedule(settings: RunSettings) -> None:
    """Make the schedule once, for nothing: transformers makes it when the run has begun.

    Raises:
        BadInput: transformers does not take its arguments.
    """
    schedule = settings.schedule
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        get_scheduler(
            schedule.name,
            optimizer,
            num_warmup_steps=schedule.warmup_steps,
            num_training_steps=schedule.warmup_steps + 1,
            scheduler_specific_kwargs=dict(schedule.arguments),
        )
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"schedule.arguments: expected those of {schedule.name}, got: {error}"
        ) from error


def check_trackers(settings: RunSettings) -> None:
    """Look for the trackers before anything else takes time.

    Raises:
        BadInput: one that transformers does not know, or that is not installed.
    """
    known = [*INTEGRATION_TO_CALLBACK, "all", "none"]
    installed = [*get_available_reporting_integrations(), "all", "none"]
    for name in settings.logging.report_to:
        if name not in known:
            near = nearest(name, known) or f"; known are {', '.join(known)}"
            raise BadInput(
                f"logging.report_to: expected names that transformers knows, got {name!r}{near}"
            )
        if name not in installed:
            raise BadInput(
                f"logging.report_to: expected trackers that are installed, got {name!r}, which is "
                f"not; pip install {name.replace('_', '-')}"
            )
