"""Settings for a model, a context and a machine; and the nearest thing where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from oomb.config import Config
from oomb.plan.choosing import (
    candidates,
    fastest,
    first_that_fits,
    in_longer_chunks,
    keeping_more,
    with_caps,
)
from oomb.plan.machine import Machine
from oomb.plan.ordinary import OrdinaryTraining, ordinary_training
from oomb.plan.planner import Planner
from oomb.plan.prediction import Prediction
from oomb.plan.remedies import Remedy, remedies
from oomb.units import bytes_text, seconds_text

_EXACT = 2**14  # chunks, of which the longest context is known to one
_CLEARLY = 0.8  # of a step's seconds: what copies of pages take decides nothing
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Settings to run with, or what comes nearest.

    Attributes:
        prediction: of the settings; where none fits, of those that need least.
        longest_context: tokens per sequence that fit with the settings of ``prediction``; None
            where the context asked for fits.
        ordinary: the same step as ordinary training with checkpointing and layer-input offload.
        advice: sentences for the user, most useful first.
        remedies: where nothing fits, changes of settings that need less, those that make it fit
            first and of these the cheapest.
    """

    prediction: Prediction
    longest_context: int | None
    ordinary: OrdinaryTraining
    advice: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        """The settings hold the context asked for."""
        return self.prediction.fits

    @property
    def config(self) -> Config:
        """Settings of the engine, ``recompute`` resolved."""
        return self.prediction.config


def predict(
    model: Any,
    num_tokens: int,
    config: Config | None = None,
    *,
    machine: Machine | None = None,
    batch_size: int = 1,
    optimizer: str | None = "adamw_torch_fused",
    optimizer_states: str = "device",
    accumulates: bool = False,
    reference: bool = False,
    image_tokens: int = 0,
    dtype: torch.dtype | None = None,
    adapter: Any = None,
    quantization: str | None = None,
    float8: bool = False,
    timed: bool = True,
) -> Prediction:
    """What one step takes with given settings.

    Arguments as of :class:`Planner` and its ``predict``.

    Raises:
        ValueError: an argument does not fit, or no such model.
        UnsupportedModelError: the model cannot be planned without running it.
    """
    made: dict[str, Any] = {"dtype": dtype, "adapter": adapter, "quantization": quantization}
    planner = Planner(model, machine, images=image_tokens > 0, float8=float8, **made)
    return planner.predict(
        num_tokens,
        config,
        batch_size=batch_size,
        optimizer=optimizer,
        optimizer_states=optimizer_states,
        accumulates=accumulates,
        reference=reference,
        image_tokens=image_tokens,
        timed=timed,
    )


def recommend(
    model: Any,
    context: int,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    *,
    gpu: str | None = None,
    machine: Machine | None = None,
    config: Config | None = None,
    keep: frozenset[str] = frozenset(),
    batch_size: int = 1,
    optimizer: str | None = "adamw_torch_fused",
    optimizer_states: str = "device",
    accumulates: bool = False,
    reference: bool = False,
    image_tokens: int = 0,
    dtype: torch.dtype | None = None,
    adapter: Any = None,
    quantization: str | None = None,
    float8: bool = False,
    timed: bool = True,
) -> Recommendation:
    """Chunk size, dtype of the pages' gradients and recompute for ``context`` tokens per sequence.

    Args:
        model: a model (with or without weights), a transformers config, a folder, a name on the
            hub, or a name of ``oomb.trace.shapes.SHAPES``.
        device_bytes, host_bytes: memory of the machine; None: this machine's, what is free, or that
            of ``gpu`` and of a host of its own.
        gpu: a name of :data:`oomb.plan.GPUS` where the plan is for another machine.
        machine: instead of the three; see :meth:`Machine.described`.
        config: settings that are not chosen here (attention, backward, caps …); None: defaults.
        keep: fields of ``config`` not to choose: of ``chunk_size``, ``kv_grad_dtype``,
            ``recompute``.
        optimizer: as the stock trainer's ``optim``.
        optimizer_states: as of ``Planner.predict``.
        accumulates: several calls per optimizer step.
        reference, image_tokens: as of ``Planner.predict``.
        dtype, adapter, quantization, float8: as of :class:`Planner`.
        timed: predict seconds, which measures this machine for about a second, and choose by them
            the chunk that ranks share.

    Raises:
        ValueError: an argument does not fit, or no such model.
        UnsupportedModelError: the model cannot be planned without running it.
    """
    if machine is None:
        machine = Machine.described(gpu=gpu, device_memory=device_bytes, host_memory=host_bytes)
    made: dict[str, Any] = {"dtype": dtype, "adapter": adapter, "quantization": quantization}
    planner = Planner(model, machine, images=image_tokens > 0, float8=float8, **made)
    base = config or Config()
    asked: dict[str, Any] = {
        "batch_size": batch_size,
        "optimizer": optimizer,
        "optimizer_states": optimizer_states,
        "accumulates": accumulates,
        "reference": reference,
        "image_tokens": image_tokens,
    }

    # What "auto" keeps is optional: it makes nothing fit or not fit, and needs no choice.
    optional = base.keep_outputs == "auto"
    without = replace(base, keep_outputs="none") if optional else base

    def roughly(candidate: Config) -> Prediction:
        return planner.predict(context, candidate, timed=False, dry_run=False, **asked)

    chosen = first_that_fits(list(candidates(without, context, keep)), roughly)
    settings = replace(chosen.config, keep_outputs=base.keep_outputs)

    def wholly(candidate: Config) -> Prediction:
        return planner.predict(context, candidate, timed=timed, **asked)

    def without_copies(candidate: Config) -> Prediction:
        return planner.predict(context, candidate, dry_run=False, **asked)

    def settled(own: Config) -> Prediction:
        found = wholly(own)
        if machine.ranks > 1 and timed and "chunk_size" not in keep:
            return fastest(found, machine.ranks, wholly, "recompute" not in keep)
        if timed and "recompute" not in keep and optional:
            return keeping_more(found, wholly)
        return found

    longer, share = settings, 1.0
    if machine.ranks == 1 and timed and keep.isdisjoint(("chunk_size", "recompute")):
        longer, share = in_longer_chunks(settings, context, without_copies)
    prediction = settled(longer)
    if _CLEARLY < share < 1.0:
        other = settled(settings)
        if other.fits and (other.seconds or 0.0) < (prediction.seconds or 0.0):
            prediction = other
    found = prediction.config
    settings = replace(settings, chunk_size=found.chunk_size, recompute=found.recompute)
    roomier = with_caps(prediction, machine, wholly) if timed and optional else None
    ordinary = ordinary_training(planner, prediction)
    longest = None
    if not prediction.fits:
        longest = _longest_context(planner, settings, context, asked)

    def changed(other: Config, name: str | None, states: str) -> Prediction:
        options = {**asked, "optimizer": name, "optimizer_states": states}
        return planner.predict(context, other, timed=timed, dry_run=False, **options)

    remedial: tuple[Remedy, ...] = ()
    if not prediction.fits:
        remedial = remedies(changed(prediction.config, optimizer, optimizer_states), changed)
    return Recommendation(
        prediction=prediction,
        longest_context=longest,
        ordinary=ordinary,
        advice=tuple(_advice(prediction, ordinary, longest, remedial, roomier)),
        remedies=remedial,
    )


def _longest_context(planner: Planner, config: Config, context: int, asked: dict[str, Any]) -> int:
    """The most tokens that fit, in whole chunks, of very many to a hundredth of a percent; 0 where
    not even the fewest do: one chunk, or as many as hold the tokens that show images, whose number
    stays.
    """
    fewest = max(1, -(-asked["image_tokens"] // config.chunk_size))
    low, high = fewest - 1, -(-context // config.chunk_size)
    while high - low > max(1, low // _EXACT):
        middle = (low + high) // 2
        tokens = middle * config.chunk_size
        fits = planner.predict(tokens, config, timed=False, dry_run=False, **asked).fits
        low, high = (middle, high) if fits else (low, middle)
    return low * config.chunk_size if low >= fewest else 0


def _advice(
    prediction: Prediction,
    ordinary: OrdinaryTraining,
    longest: int | None,
    found: tuple[Remedy, ...],
    roomier: Prediction | None,
) -> Iterator[str]:
    if not prediction.fits:
        yield prediction.shortage
        if longest:
            yield f"the longest context that fits with these settings: {longest:,} tokens"
        yield (
            f"the smallest settings for {prediction.num_tokens:,} tokens need "
            f"{bytes_text(prediction.device_bytes)} on the device and "
            f"{bytes_text(prediction.host_bytes)} on the host"
        )
        if found and found[0].fits:
            yield f"it fits with {found[0]}"
    if roomier is not None:
        yield _of_caps(prediction, roomier)
    optional = prediction.kept_output_bytes + prediction.kept_mlp_output_bytes
    ours = prediction.device_bytes + prediction.host_bytes - optional
    theirs = ordinary.device_bytes + ordinary.host_bytes
    if ordinary.fits and theirs < ours:
        yield (
            "ordinary training with checkpointing and layer-input offload needs less here: about "
            f"{bytes_text(ordinary.device_bytes)} on the device and "
            f"{bytes_text(ordinary.host_bytes)} on the host"
        )


def _of_caps(chosen: Prediction, roomier: Prediction) -> str:
    """What the caps by name of ``roomier`` would spare."""
    caps = [(name, getattr(roomier.config, name)) for name in ("device_memory", "host_memory")]
    given = " and ".join(
        f"{name}='{cap // _GIB}GiB'" for name, cap in caps if cap != getattr(chosen.config, name)
    )
    more, now = roomier.kept_output_share, chosen.kept_output_share
    spared = (chosen.seconds or 0.0) - (roomier.seconds or 0.0)
    return (
        "keep_outputs='auto' leaves half of the memory that is not given by name: with "
        f"{given} it would keep {more:.0%} of attention's outputs in place of {now:.0%}, and the "
        f"step take {seconds_text(spared)} less"
    )
