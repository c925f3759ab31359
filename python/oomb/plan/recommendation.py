"""Settings for a model, a context and a machine; and the nearest thing where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from oomb.config import Config, Dense
from oomb.core.recompute import Recompute, levels_above
from oomb.core.tiers import TIER_SHARE
from oomb.plan.machine import Machine
from oomb.plan.ordinary import OrdinaryTraining, ordinary_training
from oomb.plan.planner import Planner
from oomb.plan.prediction import Prediction
from oomb.plan.remedies import Remedy, remedies
from oomb.units import bytes_text, seconds_text

_CHUNKS = (4096, 2048, 1024, 512)  # larger ones take more memory and are hardly faster
_CHUNKS_OVER_LINK = (16384, 8192, *_CHUNKS)  # where weights or sums come for every chunk
_EXACT = 2**14  # chunks, of which the longest context is known to one
_SPARED = 0.02  # of a step's seconds: less is not worth a sentence
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

    chosen = _best(list(_candidates(without, context, keep)), roughly)
    settings = replace(chosen.config, keep_outputs=base.keep_outputs)

    def wholly(candidate: Config) -> Prediction:
        return planner.predict(context, candidate, timed=timed, **asked)

    prediction = wholly(settings)
    if machine.ranks > 1 and timed and "chunk_size" not in keep:
        prediction = _fastest(prediction, machine.ranks, wholly, "recompute" not in keep)
        found = prediction.config
        settings = replace(settings, chunk_size=found.chunk_size, recompute=found.recompute)
    elif timed and "recompute" not in keep and optional:
        prediction = _keeping_more(prediction, wholly)
    roomier = _with_caps(prediction, machine, wholly) if timed and optional else None
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


def _over_link(config: Config) -> bool:
    """Every chunk brings weights or sums from the host, so that long ones hide it."""
    return "host" in (config.weights, config.main_grad_device)


def _candidates(base: Config, context: int, keep: frozenset[str]) -> Iterator[list[Config]]:
    """Settings in order of preference, a list per dtype of gradient pages: exact sums first."""
    sizes = _CHUNKS_OVER_LINK if _over_link(base) else _CHUNKS
    chunks = [c for c in sizes if c % base.page_size == 0 and (c < 2 * context or c == 512)]
    chunks = [base.chunk_size] if "chunk_size" in keep or not chunks else chunks
    dtypes = [base.kv_grad_dtype] if "kv_grad_dtype" in keep else ["float32", "bfloat16"]
    recomputes = [base.recompute] if "recompute" in keep else list(get_args(Recompute))
    for dtype in dtypes:
        yield [
            replace(
                base,
                chunk_size=chunk,
                kv_grad_dtype=dtype,  # type: ignore[arg-type]
                recompute=recompute,
            )
            for recompute in recomputes
            for chunk in chunks
        ]


def _best(candidates: list[list[Config]], roughly: Callable[[Config], Prediction]) -> Prediction:
    """The first that fits; one whose pages all stay on the device, if that is to be had.

    Where the host keeps the weights, short chunks cost more of the link than pages that spill.
    Where none fits, the one that needs least.
    """
    least: Prediction | None = None
    for of_dtype in candidates:
        least = roughly(of_dtype[-1])
        if not least.fits:
            continue
        first: Prediction | None = None
        for candidate in of_dtype:
            found = roughly(candidate)
            if not found.fits:
                continue
            spills = found.host_pool_bytes > 0 and not _over_link(found.config)
            if not spills or least.host_pool_bytes > 0:
                return first or found
            first = first or found
        return first or least
    assert least is not None
    return least


def _fastest(
    chosen: Prediction,
    ranks: int,
    predicted: Callable[[Config], Prediction],
    may_recompute: bool,
) -> Prediction:
    """The same settings with the chunk that takes least time, up to as many tokens a rank.

    Ranks divide a chunk, so a short one leaves each little between exchanges, gathers of weights
    and starts of kernels. A longer one may be worth that layers are recomputed.
    """
    best, own = chosen, chosen.config
    longest = min(own.chunk_size * ranks, chosen.num_tokens) if chosen.fits else 0
    for recompute in (own.recompute, *levels_above(own.recompute)):
        if recompute != own.recompute and not may_recompute:
            continue
        size = own.chunk_size
        while 2 * size <= longest:
            size *= 2
            found = predicted(replace(own, chunk_size=size, recompute=recompute))
            if not found.fits:
                break
            if found.seconds is not None and found.seconds < (best.seconds or 0.0):
                best = found
    return best


def _keeping_more(chosen: Prediction, predicted: Callable[[Config], Prediction]) -> Prediction:
    """With more done again, where outputs in its room spare more time than that takes.

    Under page-sparse attention they spare too little.
    """
    own, best = chosen.config, chosen
    if not chosen.fits or chosen.kept_output_share == 1 or not isinstance(own.attention, Dense):
        return chosen
    for recompute in levels_above(own.recompute):
        found = predicted(replace(own, recompute=recompute))
        if found.fits and found.seconds is not None and found.seconds < (best.seconds or 0.0):
            best = found
    return best


def _with_caps(
    chosen: Prediction, machine: Machine, predicted: Callable[[Config], Prediction]
) -> Prediction | None:
    """With caps of both tiers by name, all of which ``auto`` takes; None where they spare little.

    Of memory that is not given by name it leaves half of what the pages do not need. The host's is
    given for all ranks there.
    """
    if not chosen.fits or chosen.seconds is None or chosen.kept_output_share == 1:
        return None
    if machine.device_type == "cpu":
        return None

    def cap(own: int | str | None, there: int, beside: int, ranks: int) -> int | str | None:
        """What the pages of ``ranks`` may have without a cap, in whole GiB."""
        return own or ranks * (int(TIER_SHARE * there) - beside) // _GIB * _GIB or None

    config = chosen.config
    on_device = chosen.device_bytes - chosen.device_pool_bytes
    on_host = chosen.host_bytes - chosen.host_pool_bytes
    here = machine.neighbours
    caps = {
        "device_memory": cap(config.device_memory, machine.device_bytes, on_device, 1),
        "host_memory": cap(config.host_memory, machine.host_bytes, on_host, here),
    }
    found = predicted(replace(config, **caps))  # type: ignore[arg-type]
    if not found.fits or found.seconds is None:
        return None
    return found if found.seconds < (1 - _SPARED) * chosen.seconds else None


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
