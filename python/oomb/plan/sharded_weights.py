"""Weights that ranks of a sequence share, in a plan: bytes of a rank, and what travels for them.

    zero1   weights once a call                               sums once a call
    zero2   weights once a call                               a layer's sums for each swept chunk
    zero3   layers for each chunk: fill, forward, backward    likewise

Gathers and sums are counted as if nothing hid them; on a GPU the next layer comes while one runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from oomb.config import Config
from oomb.core.rounded_sums import sum_dtype
from oomb.parallel.whole import groups_and_whole
from oomb.plan.machine import Machine
from oomb.plan.optimizers import OptimizerUse
from oomb.plan.pages import PageCall
from oomb.trace.trace import Tracer

AT_A_TIME = 3  # layers that are gathered together: one runs, one comes, one goes


@dataclass(frozen=True)
class ShardedWeightsUse:
    """Bytes of one of several ranks that share weights.

    Attributes:
        parameter_bytes: of parameters and buffers, between calls.
        gathered_bytes: of other ranks' weights that it holds in a call, at most.
        sum_bytes: of gradient sums that it holds at a time.
        trained_share: of trained values, the part that is its own.
        layer_bytes, other_bytes: of whole weights, in decoder layers and beside them.
        layer_sum_bytes, other_sum_bytes: of whole sums, likewise.
    """

    parameter_bytes: int
    gathered_bytes: int
    sum_bytes: int
    trained_share: float
    layer_bytes: int
    other_bytes: int
    layer_sum_bytes: int
    other_sum_bytes: int
    policy: str
    ranks: int

    @staticmethod
    def of(tracer: Tracer, config: Config, machine: Machine) -> ShardedWeightsUse | None:
        """None where each rank has all weights.

        Raises:
            ValueError: settings under which weights are not shared.
        """
        if machine.weights == "replicated" or machine.ranks == 1:
            return None
        if config.weights != "device":
            raise ValueError(
                f"weights: expected 'device' beside sharded weights, got {config.weights!r}"
            )
        ranks, inside = machine.ranks, {p for layer in tracer.layers for p in layer}
        beside = [p for p in tracer.parameters if p not in inside]
        groups, whole = groups_and_whole(tracer.layers, beside)

        def weights(parameters: Iterable[nn.Parameter]) -> int:
            return sum(p.nbytes for p in parameters if p not in whole)

        def sums(parameters: Iterable[nn.Parameter]) -> int:
            trained = [p for p in parameters if p.requires_grad and p not in whole]
            return sum(p.numel() * sum_dtype(p, config.main_grad_dtype).itemsize for p in trained)

        def own(parameters: Iterable[nn.Parameter]) -> int:
            sizes = [(p.numel(), 1 if p in whole else ranks) for p in parameters]
            return sum(math.ceil(size / sharing) for size, sharing in sizes)

        of_layers, of_sums = [*map(weights, groups)], [*map(sums, groups)]
        others, other_sums = of_layers.pop(), of_sums.pop()
        sharded = sum(of_layers) + others
        whole_sums = sum(
            p.numel() * sum_dtype(p, config.main_grad_dtype).itemsize
            for p in whole
            if p.requires_grad
        )
        if machine.weights == "zero3":
            gathered = sum(sorted(of_layers)[-AT_A_TIME:]) + others
        else:
            gathered = sharded
        if machine.weights == "zero1":
            held = sum(of_sums) + other_sums
        else:  # as the engine counts them
            held = other_sums + sum(of_sums) // ranks + 3 * max(of_sums, default=0)
        return ShardedWeightsUse(
            parameter_bytes=tracer.parameter_bytes - sharded + math.ceil(sharded / ranks),
            gathered_bytes=gathered,
            sum_bytes=held + whole_sums,
            trained_share=own(tracer.trainable) / max(1, sum(p.numel() for p in tracer.trainable)),
            layer_bytes=sum(of_layers),
            other_bytes=others,
            layer_sum_bytes=sum(of_sums),
            other_sum_bytes=other_sums + 2 * whole_sums,  # these come back whole
            policy=machine.weights,
            ranks=ranks,
        )

    def optimizer(self, use: OptimizerUse) -> OptimizerUse:
        """What a rank's part of an optimizer takes."""
        names = ("device_bytes", "host_bytes", "step_bytes", "moved_bytes", "link_bytes")
        return replace(use, **{n: math.ceil(getattr(use, n) * self.trained_share) for n in names})

    def own_gradients(self, num_bytes: int) -> int:
        """A rank's part of gradients."""
        return math.ceil(num_bytes * self.trained_share)

    def received_bytes(self, call: PageCall) -> float:
        """Of weights and sums, from other ranks, in a call."""
        swept = len(call.swept)
        gathers = call.filled + 2 * swept if self.policy == "zero3" else 1
        scatters = 1 if self.policy == "zero1" else swept
        weights = gathers * self.layer_bytes + self.other_bytes
        sums = scatters * self.layer_sum_bytes + self.other_sum_bytes
        return (weights + sums) * (self.ranks - 1) / self.ranks
