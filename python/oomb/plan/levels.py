"""What a chunk costs on the average, where the sweep computes less and less again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from oomb.core.recompute import Recompute
from oomb.trace.meter import Work
from oomb.trace.trace import Trace


def mean_trace(chunks: dict[Recompute, int], traced: Callable[[Recompute], Trace]) -> Trace:
    """A chunk of a call of so many chunks at each level; ``traced`` is one at a level."""
    traces = {level: traced(level) for level in chunks}
    total = sum(chunks.values())

    def mean(value: Callable[[Trace], float]) -> float:
        return sum(value(traces[level]) * number for level, number in chunks.items()) / total

    return replace(
        next(iter(traces.values())),
        sweep_peak_bytes=round(mean(lambda trace: trace.sweep_peak_bytes)),
        sweep=Work(
            flops=mean(lambda trace: trace.sweep.flops),
            moved_bytes=mean(lambda trace: trace.sweep.moved_bytes),
            operations=round(mean(lambda trace: trace.sweep.operations)),
        ),
    )
