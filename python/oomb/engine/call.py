"""One call of an engine: its parts, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from oomb.config import Config
from oomb.core.attention import ChunkAttention
from oomb.core.border_states import BorderStates
from oomb.core.inputs import CallInputs
from oomb.core.loop import ChunkLoop
from oomb.core.loss import ChunkLoss
from oomb.core.recompute import Recompute
from oomb.core.stopwatch import Stopwatch
from oomb.core.tiers import reserved_ratio
from oomb.core.weight_copies import WeightCopies
from oomb.model.causal import CausalModel
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights
from oomb.results import Selection, Stats, Step

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A call under way."""

    model: CausalModel
    config: Config
    inputs: CallInputs
    loop: ChunkLoop
    loss: ChunkLoss
    attention: ChunkAttention
    borders: BorderStates
    placement: Placement
    weights: Weights
    exchanges: Stopwatch
    weight_copies: WeightCopies
    recompute: Recompute

    def result(self, fill_seconds: float, sweep_seconds: float = 0.0) -> Step:
        """What the caller gets; before the call's pages are gone."""
        pages = self.attention.pages
        if self.model.device.type == "cuda":  # waits and copies are measured when they are over
            torch.cuda.synchronize(self.model.device)
        counters = pages.manager.stats()
        waits = pages.order.by_pass(pages.manager.waits().sum(axis=0))
        each = self.attention.head_groups  # the manager's layers of one of the model's
        exposed = {name: x.reshape(len(x), -1, each).sum(axis=2) for name, x in waits.items()}
        reads = counters.hits + counters.misses
        selection: Selection = []
        if self.config.record_selection and pages.choice is not None:
            chosen = pages.choice.of_call(pages.layers.number, self.placement)
            nothing: list[torch.Tensor | None] = [None] * pages.chunks.number
            selection = self._by_layer(chosen, nothing)
        logprobs = self.loss.logprobs
        if logprobs is not None:
            logprobs = self.placement.total(logprobs)
        return Step(
            loss=self.placement.total(self.loss.total).to(self.model.loss_dtype),
            num_valid_tokens=self.inputs.num_valid,
            stats=Stats(
                fill_seconds=fill_seconds,
                sweep_seconds=sweep_seconds,
                device_peak_bytes=counters.device_peak_bytes,
                host_peak_bytes=counters.host_peak_bytes,
                h2d_bytes=counters.h2d_bytes,
                d2h_bytes=counters.d2h_bytes,
                exposed_copy_seconds=counters.exposed_copy_seconds,
                exposed_growth_seconds=counters.exposed_growth_seconds,
                hit_rate=counters.hits / reads if reads else 1.0,
                h2d_seconds=counters.h2d_seconds,
                d2h_seconds=counters.d2h_seconds,
                exposed_by_chunk={name: x.sum(axis=1).tolist() for name, x in exposed.items()},
                exposed_by_layer={
                    name: self._by_layer(x.sum(axis=0).tolist(), 0.0) for name, x in exposed.items()
                },
                kept_output_seconds=self.attention.kept_seconds.total,
                border_state_bytes=self.borders.kept_bytes,
                image_feature_bytes=self.loop.images.num_bytes,
                reserved_ratio=reserved_ratio(self.model.device),
                exchange_seconds=self.exchanges.total,
                gathered_weight_bytes=self.weights.gathered_bytes,
                **self.weight_copies.stats(),
                **pages.outputs.stats(pages.swept, self.recompute),
            ),
            selection=selection,
            logprobs=logprobs,
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        metrics = self.loss.metrics
        if metrics is None:
            return {}
        total = self.placement.total
        count = total(torch.full_like(metrics.entropy, metrics.count))
        sums = {"entropy": metrics.entropy, "accuracy": metrics.right.double()}
        return {name: float(total(x) / count.clamp(min=1)) for name, x in sums.items()}

    def with_exchanges(self, step: Step) -> Step:
        """A step with all exchanges of its call, those of the gradient sums among them."""
        if self.placement.ranks == 1:
            return step
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        stats = replace(
            step.stats,
            exchange_seconds=self.exchanges.total,
            scattered_sum_bytes=self.weights.scattered_bytes,
        )
        return replace(step, stats=stats)

    def _by_layer(self, of_paged: list[T], without: T) -> list[T]:
        """A value for each decoder layer, from those of layers that have pages."""
        paged, layers = self.model.paged, range(len(self.model.layers))
        return [of_paged[paged[layer]] if layer in paged else without for layer in layers]
