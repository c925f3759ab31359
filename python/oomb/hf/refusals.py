"""What a trainer's settings may ask for that the engine cannot do; refused by name, before work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainingArguments

from oomb.config import Config
from oomb.engine.router_loss import asks_for_router_loss
from oomb.parallel.job import ranks_in_job

# Argument of the trainer: why it must be None.
_TRAINER_ARGUMENTS = {
    "compute_loss_func": "the engine computes the loss itself, chunk by chunk",
}
_WHOLE = "each rank has the whole model; start with torchrun, and ranks share each sequence"
# Field of TrainingArguments: the value it must have (or be as false as), and why.
_SETTINGS: dict[str, tuple[object, str]] = {
    "label_smoothing_factor": (0.0, "the engine's loss is plain cross-entropy"),
    "neftune_noise_alpha": (None, "its noise would differ between fill and sweep"),
    "torch_compile": (False, "the engine runs the model's layers itself"),
    "use_liger_kernel": (False, "the engine uses liger kernels by itself where they are installed"),
    "deepspeed": (None, _WHOLE),
    "fsdp": (False, _WHOLE),
    "bf16_full_eval": (False, "evaluation uses the dtype of training; load the model in bfloat16"),
    "fp16_full_eval": (False, "evaluation uses the dtype of training; load the model in float16"),
    "enable_jit_checkpoint": (False, "SIGTERM already saves a checkpoint"),
    "activation_offloading": (False, "no activations outlive a chunk"),
}
# Trainers whose loss is a function of per-token values that the engine gives.
_OF_TOKEN_VALUES = {
    ("trl.trainer.dpo_trainer", "DPOTrainer"),
    ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    ("trl.trainer.kto_trainer", "KTOTrainer"),
    ("trl.trainer.reward_trainer", "RewardTrainer"),
    ("trl.trainer.rloo_trainer", "RLOOTrainer"),
}
_LOSSES = {("trl.trainer.sft_trainer", "SFTTrainer"): ("loss_type", ("nll", "dft"))}


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Check what a trainer is constructed with.

    Raises:
        ValueError: names the argument or field, what was expected and why.
    """
    for name, reason in _TRAINER_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name}: expected None, got one: {reason}")
    settings = arguments.get("args")
    if settings is None:
        return
    if not isinstance(settings, TrainingArguments):
        hint = "; give it as oomb_config" if isinstance(settings, Config) else ""
        kind = type(settings).__name__
        raise ValueError(f"args: expected TrainingArguments, got {kind}{hint}")
    for name, (expected, reason) in _SETTINGS.items():
        value = getattr(settings, name, expected)
        if value and value != expected:
            raise ValueError(f"{name}: expected {expected!r}, got {value!r}: {reason}")
    optimizer = str(getattr(settings.optim, "value", settings.optim))
    if optimizer.endswith(("lomo", "_layerwise")):
        raise ValueError(
            f"optim: expected an optimizer that steps after backward, got {optimizer!r}: it would "
            "see the gradient of one chunk"
        )
    started = ranks_in_job()
    if started != settings.world_size:
        raise ValueError(
            f"world_size: expected the {started} processes that were started, got "
            f"{settings.world_size} that TrainingArguments joined; on CPUs they join with "
            "use_cpu=True"
        )


def refuse_ranks(reason: str) -> None:
    """Refuse to run in several processes.

    Raises:
        ValueError: there are several.
    """
    processes = ranks_in_job()
    if processes > 1:
        raise ValueError(
            f"world_size: expected 1, got {processes}: {reason}; start the script without torchrun "
            "or accelerate launch"
        )


def refuse_own_loss(trainer: Trainer) -> None:
    """Refuse a trainer whose loss is not the cross-entropy that the engine computes.

    Raises:
        ValueError: names the class or field.
    """
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    known = _LOSSES.get((owner.__module__, owner.__name__))
    if owner is not Trainer and known is None:
        raise ValueError(
            f"{owner.__name__}.compute_loss: expected the one of transformers.Trainer, got "
            "another: the engine computes the loss itself and would not call it"
        )
    if known is not None:
        name, expected = known
        value = getattr(trainer.args, name, expected[0])
        if value not in expected:
            raise ValueError(f"{name}: expected one of {', '.join(expected)}, got {value!r}")
    _refuse_router_loss(trainer)
    _refuse_scaled_router_loss(trainer)


def refuse_of_two_passes(trainer: Trainer) -> None:
    """Refuse a trainer whose loss asks its model for more than values of tokens.

    Raises:
        ValueError: names the class or field.
    """
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    if (owner.__module__, owner.__name__) not in _OF_TOKEN_VALUES:
        known = ", ".join(sorted(name for _, name in _OF_TOKEN_VALUES))
        raise ValueError(
            f"{owner.__name__}.compute_loss: expected that of TRL's {known}, got another, which "
            "may ask the model for more than log-probabilities and entropies of tokens"
        )
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            "cast_lm_head_to_fp32: expected False, got True: the engine runs the model's own head"
        )
    _refuse_router_loss(trainer)


def _refuse_scaled_router_loss(trainer: Any) -> None:
    """The engine adds a loss of routers whole to every micro-batch, as the model does."""
    if not asks_for_router_loss(trainer.model):
        return
    why = "the model's router auxiliary loss (config.output_router_logits)"
    if trainer.args.fp16:
        raise ValueError(f"fp16: expected False, got True: {why} would not be scaled; use bf16")
    steps = trainer.args.gradient_accumulation_steps
    if steps > 1 and not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"gradient_accumulation_steps: expected 1, got {steps}: {why} would not be divided by "
            "it; the model's forward takes no num_items_in_batch"
        )
    replicas = trainer.replicas.number
    if replicas > 1:
        raise ValueError(
            "parallelism_config.cp_size: expected all processes to share each sequence, got "
            f"{replicas} groups of them: each would add {why}"
        )


def _refuse_router_loss(trainer: Any) -> None:
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            "router_aux_loss_coef: expected 0.0, got "
            f"{getattr(trainer, 'router_aux_loss_coef', None)}: a router auxiliary loss is not "
            "supported"
        )
