"""What one optimizer step did, for a run's observer."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from oomb.parallel.job import Job
from oomb.parallel.replicas import Replicas
from oomb.results import Step


class StepRecord:
    """Collects the micro-batches of an optimizer step.

    Args:
        data_seconds: that the step has waited for its batches before it is recorded here.
    """

    def __init__(self, data_seconds: float = 0.0) -> None:
        self.data_seconds = data_seconds
        self.began = time.perf_counter() - data_seconds
        self.calls: list[Step] = []
        self.loss = 0.0
        self.tokens = 0
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self._of_ranks: dict[str, Any] = {}

    def add(self, call: Step, loss: torch.Tensor, tokens: int) -> None:
        """A micro-batch is done; ``loss`` is its share of the step's."""
        self.calls.append(call)
        self.loss += float(loss)
        self.tokens += tokens

    def of_ranks(self, job: Job, replicas: Replicas) -> StepRecord:
        """With the loss and tokens of all replicas, and each rank's seconds; every rank takes part.

        Memory, copies and the seconds of passes stay this rank's.
        """
        if job.size > 1:
            seconds = sum(call.stats.exchange_seconds for call in self.calls)
            each = job.collect(lambda: (time.perf_counter() - self.began, seconds))
            shares = replicas.collect(lambda: (self.loss, self.tokens))
            self.loss = sum(loss for loss, _ in shares)
            self.tokens = sum(tokens for _, tokens in shares)
            self._of_ranks = {
                "ranks": job.size,
                "seconds_by_rank": [of_step for of_step, _ in each],
                "exchange_seconds_by_rank": [of_exchanges for _, of_exchanges in each],
            }
        return self

    def finished(self, step: int, epoch: float | None) -> dict[str, Any]:
        """The record; see docs/report.md for its keys."""
        seconds = time.perf_counter() - self.began
        stats = [call.stats for call in self.calls]
        return {
            "step": step,
            "epoch": epoch,
            "tokens": self.tokens,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "seconds": seconds,
            "data_seconds": self.data_seconds,
            "fill_seconds": sum(s.fill_seconds for s in stats),
            "sweep_seconds": sum(s.sweep_seconds for s in stats),
            "tokens_per_second": self.tokens / seconds,
            "device_peak_bytes": max((s.device_peak_bytes for s in stats), default=0),
            "host_peak_bytes": max((s.host_peak_bytes for s in stats), default=0),
            "h2d_bytes": sum(s.h2d_bytes for s in stats),
            "d2h_bytes": sum(s.d2h_bytes for s in stats),
            "exposed_copy_seconds": sum(s.exposed_copy_seconds for s in stats),
            "exposed_growth_seconds": sum(s.exposed_growth_seconds for s in stats),
            "fetched_weight_bytes": sum(s.fetched_weight_bytes for s in stats),
            "exposed_weight_seconds": sum(s.exposed_weight_seconds for s in stats),
            "hit_rate": sum(s.hit_rate for s in stats) / len(stats) if stats else 1.0,
            "kept_output_share": max((s.kept_output_share for s in stats), default=0.0),
            "kept_output_bytes": max((s.kept_output_bytes for s in stats), default=0),
            "kept_mlp_output_bytes": max((s.kept_mlp_output_bytes for s in stats), default=0),
            "loose_output_bytes": max((s.loose_output_bytes for s in stats), default=0),
            "recomputed": dict(sum((Counter(s.recomputed) for s in stats), Counter())),
            "kept_output_seconds": sum(s.kept_output_seconds for s in stats),
            "torch_peak_bytes": (
                torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
            ),
            **self._of_ranks,
        }
