"""Which settings a plan takes: the first that fit, by preference, then what is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

from oomb.config import Config, Dense
from oomb.core.recompute import Recompute, levels_above
from oomb.core.tiers import TIER_SHARE
from oomb.plan.machine import Machine
from oomb.plan.prediction import Prediction

_CHUNKS = (4096, 2048, 1024, 512)  # larger ones take more memory and are hardly faster
_CHUNKS_OVER_LINK = (16384, 8192, *_CHUNKS)  # where weights or sums come for every chunk
_SPARED = 0.02  # of a step's seconds: less is not worth a sentence
_GIB = 2**30


def _over_link(config: Config) -> bool:
    """Every chunk brings weights or sums from the host, so that long ones hide it."""
    return "host" in (config.weights, config.main_grad_device)


def _chunks(base: Config, context: int) -> list[int]:
    """Chunks to try, the longest first."""
    sizes = _CHUNKS_OVER_LINK if _over_link(base) else _CHUNKS
    return [c for c in sizes if c % base.page_size == 0 and (c < 2 * context or c == 512)]


def candidates(base: Config, context: int, keep: frozenset[str]) -> Iterator[list[Config]]:
    """Settings in order of preference, a list per dtype of gradient pages: exact sums first."""
    chunks = _chunks(base, context)
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


def first_that_fits(
    candidates: list[list[Config]], roughly: Callable[[Config], Prediction]
) -> Prediction:
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


def fastest(
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


def in_longer_chunks(
    own: Config, context: int, predicted: Callable[[Config], Prediction]
) -> tuple[Config, float]:
    """With more done again, where chunks that become longer by that spare more time than it takes.

    Short chunks wait for weights, sums of gradients and pages, which come for each of them.

    Args:
        predicted: without what copies of pages take.

    Returns:
        The settings, and what they take of the seconds of ``own``.
    """
    longer = [size for size in reversed(_chunks(own, context)) if size > own.chunk_size]
    levels = levels_above(own.recompute) if longer else ()
    first = predicted(own) if levels else None
    if first is None or not first.fits or not first.seconds:
        return own, 1.0
    found, share = own, 1.0
    for recompute in levels:
        fitting, rest = None, longer
        while rest:  # where a chunk fits, shorter ones do
            middle = len(rest) // 2
            other = predicted(replace(own, chunk_size=rest[middle], recompute=recompute))
            fitting = other if other.fits else fitting
            rest = rest[middle + 1 :] if other.fits else rest[:middle]
        of_it = 1.0 if fitting is None else (fitting.seconds or 0.0) / first.seconds
        if fitting is not None and of_it < share - _SPARED:
            found, share = fitting.config, of_it
    return found, share


def keeping_more(chosen: Prediction, predicted: Callable[[Config], Prediction]) -> Prediction:
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


def with_caps(
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
