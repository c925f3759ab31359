"""What a run will take, and beside it what it took."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.float8 import RECIPE
from oomb.parallel.job import ranks_of_host
from oomb.plan import OPTIMIZERS, Machine, Prediction, predict, recommend, write_measured
from oomb.report.runs import read_run
from oomb.trace.bare import bare_model
from oomb.trace.quantized import pack_linears
from oomb.trace.tower import ShownImages
from oomb.train.adapters import with_adapters, without_heads
from oomb.train.arguments import (
    decided,
    engine_config,
    holdings_to_try,
    sharing_ranks,
)
from oomb.train.errors import BadInput
from oomb.train.model import device_of
from oomb.train.settings import RunSettings
from oomb.train.tasks import holds_reference, task_of
from oomb.units import bytes_text, seconds_text


def plan_run(
    settings: RunSettings,
    config: PreTrainedConfig,
    num_tokens: int,
    console: Console,
    *,
    most_shown: int | None = None,
) -> Prediction:
    """Predict and print what a call of the engine on sequences of ``num_tokens`` takes.

    Args:
        most_shown: tokens of a sequence that show images, at most; None: a run on text.

    Raises:
        BadInput: more than there is; the text names the nearest settings that would fit.
    """
    asked: dict[str, Any] = {
        "batch_size": settings.training.batch_size * _sequences_per_example(settings),
        "optimizer": settings.optimizer.name if settings.optimizer.name in OPTIMIZERS else None,
        "optimizer_states": settings.optimizer.states,
        "accumulates": settings.training.accumulation_steps > 1,
        "reference": holds_reference(settings),
    }
    model = _without_weights(settings, config, images=most_shown is not None)
    if most_shown is not None:
        asked["image_tokens"] = _planned(model, most_shown, console)
    machine = Machine.here(device_of(settings.model).type)
    sharing = sharing_ranks(settings)
    here = machine
    for holding in holdings_to_try(settings):
        engine = engine_config(decided(settings, holding))
        if sharing is not None:
            here = machine.of_rank(sharing.cp_size, ranks_of_host(), holding.weights)
        prediction = predict(model, num_tokens, engine, machine=here, **asked)
        if prediction.fits:
            break
    _print_plan(console, prediction)
    if most_shown is not None and prediction.image_bytes:
        told = most_shown * settings.training.batch_size
        before, beside = map(bytes_text, (prediction.image_bytes, prediction.image_host_bytes))
        _print(
            console,
            f"Images: {told:,} tokens of a call at most: {before} on the device before its chunks, "
            f"{beside} of features on the host",
        )
    if not prediction.fits:
        nearest = recommend(model, num_tokens, machine=here, config=engine, timed=False, **asked)
        raise BadInput(_refusal(prediction, nearest.fits, nearest.config, nearest.advice))
    return prediction


def finish(run: Path, prediction: Prediction, accumulation_steps: int, console: Console) -> None:
    """Put what the run's steps took into its plan, and print both."""
    metrics = read_run(run)
    # Before a resume a step may have been divided otherwise.
    begun = metrics.metrics.start.get("resumed_from_step") or 0
    steps = metrics.metrics.steps
    own = [record for record in steps if record["step"] > begun] or steps
    longest = max(record["tokens"] for record in own)
    # Of steps as long as those predicted, but the first, which also allocates.
    alike = [record for record in own if record["tokens"] == longest]
    seconds = statistics.median(
        record["fill_seconds"] + record["sweep_seconds"] for record in alike[1:] or alike
    )
    measured: dict[str, Any] = {
        "device_pool_bytes": int(metrics.most("device_peak_bytes") or 0),
        "host_pool_bytes": int(metrics.most("host_peak_bytes") or 0),
        "torch_peak_bytes": metrics.most("torch_peak_bytes"),
        "kept_output_bytes": int(metrics.most("kept_output_bytes") or 0),
        "kept_mlp_output_bytes": int(metrics.most("kept_mlp_output_bytes") or 0),
        "seconds": seconds / accumulation_steps,
    }
    write_measured(run, **measured)
    table = Table("one call", "predicted", "measured", box=None, pad_edge=False)
    for label, name, text in (
        ("pages on the device", "device_pool_bytes", bytes_text),
        ("pages on the host", "host_pool_bytes", bytes_text),
        ("torch's memory", "torch_peak_bytes", bytes_text),
        ("time", "seconds", seconds_text),
    ):
        expected, found = getattr(prediction, name), measured[name]
        if expected is not None and found is not None:
            table.add_row(label, text(expected), text(found))
    console.print(table)


def _sequences_per_example(settings: RunSettings) -> int:
    task = task_of(settings)
    return 1 if task is None else task.rows_per_example


def _planned(model: nn.Module, most_shown: int, console: Console) -> int:
    """Tokens that show images, where their tower can be planned; else 0, which is told."""
    try:
        ShownImages.on(CausalModel(model), most_shown, most_shown)
    except UnsupportedModelError as error:
        _print(console, f"Images: not planned: {error}")
        return 0
    return most_shown


def _without_weights(settings: RunSettings, config: PreTrainedConfig, *, images: bool) -> nn.Module:
    dtype, lora = settings.model.dtype, settings.lora
    kind = None if dtype == "auto" else getattr(torch, dtype)
    try:
        float8 = settings.model.float8 == RECIPE  # the other one takes as long as bf16
        model: Any = bare_model(config, dtype=kind, float8=float8, images=images)
        if settings.model.quantization is not None:
            pack_linears(model, settings.model.quantization)
    except Exception as error:  # whatever modules make of a config that fits no model
        reason = str(error).partition("\n")[0][:200]
        raise BadInput(
            "model.name: expected a config that a model can be made from, got "
            f"{settings.model.name!r}: {type(error).__name__}: {reason}"
        ) from error
    if lora is None:
        return model  # type: ignore[no-any-return]
    if settings.task == "reward":  # the model of the plan writes
        lora = without_heads(lora)
    try:
        return with_adapters(model, lora)
    except BadInput:
        raise
    except (ValueError, re.error) as error:  # text is a regular expression
        raise BadInput(
            f"lora.target_modules: expected layers of the model, got {lora.target_modules!r}; "
            f"peft says: {error}"
        ) from error


def _print_plan(console: Console, prediction: Prediction) -> None:
    config, seconds = prediction.config, prediction.seconds
    held = prediction.machine.weights
    shared = "" if held == "replicated" else f", weights shared by {held}"
    if config.main_grad_device == "host":
        shared += ", gradient sums on the host"
    beside = prediction.reference_bytes
    asked = f", {bytes_text(beside)} the reference" if beside else ""
    time = "" if seconds is None else f", about {seconds_text(seconds)} per call"
    _print(
        console,
        f"Plan: {prediction.num_tokens:,} tokens in chunks of {config.chunk_size:,}: "
        f"{bytes_text(prediction.device_bytes)} on the device "
        f"({bytes_text(prediction.device_pool_bytes)} of it pages{asked}), "
        f"{bytes_text(prediction.host_bytes)} on the host{time}{shared}",
    )


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _refusal(prediction: Prediction, fits: bool, config: Any, advice: tuple[str, ...]) -> str:
    if not fits:
        return "\n".join(
            [
                f"engine: expected what this machine holds, got more: {prediction.shortage}",
                *(sentence for sentence in advice if sentence != prediction.shortage),
            ]
        )
    asked = prediction.config
    changes = [
        f"engine.{name}={getattr(config, name)}"
        for name in ("chunk_size", "recompute", "kv_grad_dtype")
        if getattr(config, name) != getattr(asked, name)
    ]
    return (
        f"engine: expected what this machine holds, got more: {prediction.shortage}\n"
        f"nearest settings that fit: {' '.join(changes)}"
    )
