"""Weights that the host keeps, in a plan: bytes of both memories, and what the link does not hide.

    fill of a chunk      every layer comes once           beside its forward
    sweep of a chunk     all but two come, twice          beside forward, beside backward

A layer's copy runs while its neighbour computes, so a pass takes the longer of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomb.config import Config
from oomb.model.host_weights import PLACES
from oomb.plan.duration import Duration, backward_seconds, forward_seconds
from oomb.plan.pages import PageCall
from oomb.plan.rates import Rates
from oomb.trace.meter import Work
from oomb.trace.trace import Trace

_MOST_CHUNKS = 64  # that are looked at; longer calls by every n-th


@dataclass(frozen=True)
class HostWeightsUse:
    """Bytes of weights that the host keeps.

    Attributes:
        host_bytes: of them all.
        device_bytes: of the places on the device that they come to.
        fill_bytes, pass_bytes: copied for a chunk's fill, and for each half of its sweep.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    fill_bytes: int = 0
    pass_bytes: int = 0

    @staticmethod
    def of(config: Config, movable_bytes: Sequence[int]) -> HostWeightsUse:
        """Of a model whose layers have so many bytes of frozen weights.

        Raises:
            ValueError: they shall be on the host and there are none.
        """
        if config.weights == "device":
            return HostWeightsUse()
        if not any(movable_bytes):
            raise ValueError(
                "weights: expected 'device' for a model whose layers are all trained, got 'host', "
                "which keeps frozen weights there; train adapters (LoRA)"
            )
        total = sum(movable_bytes)
        return HostWeightsUse(
            host_bytes=total,
            device_bytes=PLACES * max(movable_bytes),
            fill_bytes=total,
            pass_bytes=sum(movable_bytes[:-2]),
        )


def with_weights(
    duration: Duration, call: PageCall, trace: Trace, rates: Rates, use: HostWeightsUse
) -> Duration:
    """The duration of a call with the time that its layers wait for their weights."""
    if use.host_bytes == 0 or call.device_type == "cpu":
        return duration

    def linear(work: Work) -> float:
        return work.flops / rates.matrix + work.moved_bytes / rates.traffic

    fill, sweep = linear(trace.fill), linear(trace.sweep)
    coming, halves = use.fill_bytes / rates.link, use.pass_bytes / rates.link

    def waits_in_fill(chunk: int) -> float:
        return max(0.0, coming - fill - forward_seconds(call, rates, (chunk,), call.shapes))

    def waits_in_sweep(chunk: int) -> float:
        forward = sweep / 3 + forward_seconds(call, rates, (chunk,), call.shapes)
        backward = 2 * sweep / 3 + backward_seconds(call, rates, (chunk,), call.shapes)
        return max(0.0, halves - forward) + max(0.0, halves - backward)

    some = max(1, call.filled // _MOST_CHUNKS)
    filled = range(0, call.filled, some)
    waiting = sum(map(waits_in_fill, filled)) * call.filled / max(1, len(filled))
    some = max(1, len(call.swept) // _MOST_CHUNKS)
    swept = call.swept[::some]
    waiting += sum(map(waits_in_sweep, swept)) * len(call.swept) / max(1, len(swept))
    tokens = min(call.chunks.chunk_size, call.chunks.tokens) * call.batch
    share = max(coming / fill, 3 * halves / sweep)
    page = call.chunks.page_size
    hidden_from = math.ceil(share * tokens / call.batch / page) * page
    return replace(duration, weights=waiting, weights_hidden_from=hidden_from)
