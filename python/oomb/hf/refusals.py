"""What a trainer's settings may ask for that the engine cannot do; refused by name, before work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainingArguments

from oomb.config import Config
from oomb.engine.router_loss import asks_for_router_loss
from oomb.hf.ranks import sharing_of
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
# Settings under which not one process alone would generate, and why.
_OF_ONE_GENERATOR = {
    "use_vllm": "vLLM would be given a part of the prompts by each process",
    "use_transformers_continuous_batching": "it waits for processes that do not generate",
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


def refuse_generation(arguments: Mapping[str, Any]) -> None:
    """Check what a trainer that generates is constructed with, where several processes share each
    completion.

    Raises:
        ValueError: names the argument or field, what was expected and why.
    """
    processes, settings = ranks_in_job(), arguments.get("args")
    if processes == 1:
        return
    if arguments.get("environment_factory") is not None:
        raise ValueError(
            f"environment_factory: expected None in {processes} processes, got one: each process "
            "would begin environments of its own; give tools or a rollout_func"
        )
    if settings is None:
        return
    for name, reason in _OF_ONE_GENERATOR.items():
        if getattr(settings, name, False):
            raise ValueError(f"{name}: expected False in {processes} processes, got True: {reason}")
    sharing = sharing_of(settings)
    groups = processes // sharing
    group, steps = settings.num_generations, settings.steps_per_generation
    sizes = {"per_device_train_batch_size": (steps, group)}
    if settings.do_eval and settings.eval_strategy != "no":
        sizes["per_device_eval_batch_size"] = (1, settings.num_generations_eval or group)
    for name, (times, of_prompt) in sizes.items():
        size = getattr(settings, name)
        if size * times * groups % of_prompt:
            factors = [f"steps_per_generation={times}"] if times > 1 else []
            factors += [f"{groups} groups"] if groups > 1 else []
            told = f", times {' and '.join(factors)}," if factors else ""
            raise ValueError(
                f"{name}: expected{told} a multiple of {of_prompt} completions of a prompt, got "
                f"{size}: {sharing} processes share each completion and count as one"
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
