"""Gradient sums that the host keeps, in a plan: bytes of both memories, and what the link adds.

sweep of a chunk   every layer's sums come and go once   beside its backward
afterwards         all come once more, as gradients; before that, where ranks add theirs up
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomb.config import Config
from oomb.core.host_sums import WHOLE_SUMS, layer_bytes, spared_bytes
from oomb.parallel.weights import Weights
from oomb.plan.duration import Duration, backward_seconds
from oomb.plan.machine import Machine
from oomb.plan.pages import PageCall
from oomb.plan.rates import Rates
from oomb.trace.trace import Trace, Tracer

_MOST_CHUNKS = 64  # that are looked at; longer calls by every n-th


@dataclass(frozen=True)
class HostSumsUse:
    """Bytes of gradient sums that the host keeps.

    Attributes:
        host_bytes: of them all.
        spared_bytes: what the device holds less.
        journeys: of all of them after the sweep.
    """

    host_bytes: int = 0
    spared_bytes: int = 0
    journeys: int = 1

    @staticmethod
    def of(config: Config, tracer: Tracer, machine: Machine) -> HostSumsUse:
        """Of a traced model's layers.

        Raises:
            ValueError: they shall be on the host, and ranks share the weights, but no sums.
        """
        if config.main_grad_device == "device":
            return HostSumsUse()
        if machine.weights == "zero1":
            raise ValueError(f"main_grad_device: expected 'device' beside {WHOLE_SUMS}, got 'host'")
        sizes: Sequence[int] = layer_bytes(tracer.trained_layers, config.main_grad_dtype, Weights())
        if machine.weights != "replicated":
            sizes = [math.ceil(size / machine.ranks) for size in sizes]
        is_summed = machine.ranks > 1 and machine.weights == "replicated"
        return HostSumsUse(sum(sizes), spared_bytes(sizes), 2 if is_summed else 1)


def with_sums(
    duration: Duration, call: PageCall, trace: Trace, rates: Rates, use: HostSumsUse
) -> Duration:
    """The duration of a call with the time that backwards wait for their layers' sums."""
    if use.host_bytes == 0 or call.device_type == "cpu":
        return duration
    work = trace.sweep
    linear = 2 / 3 * (work.flops / rates.matrix + work.moved_bytes / rates.traffic)
    moving = use.host_bytes / rates.link  # each way; they go beside one another

    def waits(chunk: int) -> float:
        return max(0.0, moving - linear - backward_seconds(call, rates, (chunk,), call.shapes))

    some = max(1, len(call.swept) // _MOST_CHUNKS)
    swept = call.swept[::some]
    waiting = sum(map(waits, swept)) * len(call.swept) / max(1, len(swept))
    tokens, page = min(call.chunks.chunk_size, call.chunks.tokens), call.chunks.page_size
    hidden_from = math.ceil(moving / linear * tokens / page) * page if linear else 0
    return replace(duration, sums=waiting + use.journeys * moving, sums_hidden_from=hidden_from)
