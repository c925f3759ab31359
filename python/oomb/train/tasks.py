"""What ``task`` names: a trainer of TRL, the columns of its rows, and the options it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import TrainingArguments

from oomb.nearest import nearest
from oomb.train.errors import BadInput
from oomb.train.settings import RunSettings


@dataclass(frozen=True)
class Task:
    """A task that a trainer of TRL carries out.

    Attributes:
        trainer: its name in :mod:`oomb.hf`.
        arguments: its configuration's name in TRL.
        needed: columns that every row has.
        prompt: whether rows may go without a prompt, which then is what the answers share.
        rows_per_example: sequences that a call of the engine has for each example of a batch.
        generates: the model writes the completions itself, and functions judge them.
        reference: the trainer is given a reference, where it holds one.
    """

    trainer: str
    arguments: str
    needed: tuple[str, ...]
    prompt: bool = False
    rows_per_example: int = 1
    generates: bool = False
    reference: bool = False


TASKS = {
    "dpo": Task("DPOTrainer", "DPOConfig", ("chosen", "rejected"), True, 2, reference=True),
    "kto": Task("KTOTrainer", "KTOConfig", ("prompt", "completion", "label"), reference=True),
    "grpo": Task("GRPOTrainer", "GRPOConfig", ("prompt",), generates=True),
    "rloo": Task("RLOOTrainer", "RLOOConfig", ("prompt",), generates=True),
    "reward": Task("RewardTrainer", "RewardConfig", ("chosen", "rejected"), True, 2),
}
# Options of TRL that other fields of the file set.
_SET_ELSEWHERE = {
    "max_length": "context",
    "max_prompt_length": "context",
    "dataset_num_proc": "data.num_proc",
    "trust_remote_code": "model.trust_remote_code",
    "model_init_kwargs": "model",
    "cast_lm_head_to_fp32": "model.dtype",
    "pad_token": "model.tokenizer",
    "eos_token": "model.tokenizer",
    "chat_template_path": "data.chat_template",
    "learning_rate": "optimizer.learning_rate",
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "gradient_accumulation_steps": "training.accumulation_steps",
    "max_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "max_grad_norm": "training.max_grad_norm",
    "seed": "training.seed",
    "bf16": "training.autocast",
    "report_to": "logging.report_to",
    "logging_steps": "logging.every_steps",
    "save_steps": "saving.every_steps",
    "save_total_limit": "saving.keep_last",
    "eval_steps": "evaluation.every_steps",
    "push_to_hub": "saving.push_to_hub",
    "warmup_steps": "schedule.warmup_steps",
    "lr_scheduler_type": "schedule.name",
    "optim": "optimizer.name",
    "weight_decay": "optimizer.weight_decay",
}


def task_of(settings: RunSettings) -> Task | None:
    """The task of a run; None: the next token's cross-entropy, which needs no TRL.

    Raises:
        BadInput: TRL is not installed.
    """
    if settings.task == "sft":
        return None
    _of_trl(TASKS[settings.task].arguments)
    return TASKS[settings.task]


def arguments_kind(task: Task) -> type[TrainingArguments]:
    """TRL's configuration of a task."""
    kind: type[TrainingArguments] = _of_trl(task.arguments)
    return kind


def checked_options(settings: RunSettings, task: Task) -> dict[str, Any]:
    """The section ``trl``, each option as TRL declares it.

    Raises:
        BadInput: an option that TRL does not have, that another field sets, or of another type;
            a reference that TRL would load with other positions than the model's.
    """
    kind = _of_trl(task.arguments)
    types = get_type_hints(kind)
    general = {field.name for field in fields(TrainingArguments)}
    known = [
        field.name
        for field in fields(kind)
        if field.name not in general and field.name not in _SET_ELSEWHERE
    ]
    found = {}
    for name, value in settings.trl.items():
        place = f"trl.{name}"
        if name in _SET_ELSEWHERE:
            raise BadInput(f"{place}: expected the field {_SET_ELSEWHERE[name]} instead, got it")
        if name not in known:
            near = nearest(name, known) or f"; known are {', '.join(known)}"
            raise BadInput(f"{place}: expected an option of {task.arguments}, got {name!r}{near}")
        try:
            strict = TypeAdapter(
                types[name], config=ConfigDict(strict=True, arbitrary_types_allowed=True)
            )
            found[name] = strict.validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise BadInput(f"{place}: expected {said}, got {value!r}") from error
    if task.generates and holds_reference(settings):
        _expect_loadable_reference(settings, found.get("beta", kind.beta))
    return found


def holds_reference(settings: RunSettings) -> bool:
    """Whether a run has a second model beside the trained one, to ask it for log-probabilities.

    None where adapters are switched off instead, answers are computed ahead, or nothing asks.
    """
    task = task_of(settings)
    if task is None or settings.lora is not None:
        return False
    if task.generates:  # TRL loads it
        return bool(settings.trl.get("beta", _of_trl(task.arguments).beta) != 0)
    return task.reference and not settings.trl.get("precompute_ref_log_probs")


def _expect_loadable_reference(settings: RunSettings, beta: float) -> None:
    """TRL loads the reference by itself where there is one, and knows nothing of these fields."""
    for name in ("rope", "revision", "max_position_embeddings"):
        if getattr(settings.model, name) is not None:
            raise BadInput(
                f"model.{name}: expected null for task {settings.task} without lora and with a "
                f"reference (trl.beta is {beta}), which TRL loads as it was saved"
            )


def reward_functions(settings: RunSettings) -> list[Callable[..., Any]]:
    """What the names in ``rewards`` lead to: functions of TRL, or of a module.

    Modules are looked for where Python finds them, and in the folder where the command runs.

    Raises:
        BadInput: a name that leads to no function.
    """
    return [_reward_function(name) for name in settings.rewards]


def _reward_function(name: str) -> Callable[..., Any]:
    place, _, attribute = name.replace(":", ".").rpartition(".")
    place = place or "trl.rewards"
    if "" not in sys.path:
        sys.path.append("")
    try:
        found = getattr(import_module(place), attribute)
    except Exception as error:  # whatever the module does when it is imported
        reason = str(error).partition("\n")[0][:200]
        raise BadInput(
            "rewards: expected functions of trl.rewards by name, or package.module.function, got "
            f"{name!r}: {type(error).__name__}: {reason}"
        ) from error
    if not callable(found) or isinstance(found, type):
        raise BadInput(f"rewards: expected functions, got {name!r}, a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _of_trl(name: str) -> Any:
    try:
        import trl  # optional, and heavy
    except ImportError as error:
        raise BadInput("task: expected trl to be installed; pip install 'oomb[trl]'") from error
    return getattr(trl, name)
