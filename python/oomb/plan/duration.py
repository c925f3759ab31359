"""Seconds of a step: each kind of work at its rate."""

from __future__ import annotations

from dataclasses import dataclass

from oomb.plan.meter import Work
from oomb.plan.pages import PageCall
from oomb.plan.pools import PoolUse
from oomb.plan.rates import Rates
from oomb.plan.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of ``forward_backward`` by kind of work.

    Attributes:
        matrix: matrix products outside attention.
        elementwise: everything else that torch computes.
        attention: attention's kernels.
        copies: copies between the tiers beyond what the rest hides.
        starting: what starting operations takes beyond what they take themselves.
        fill: seconds of the fill, of the total.
        basis: ``"measured"`` or ``"datasheet"``, the origin of the rates.
    """

    matrix: float
    elementwise: float
    attention: float
    copies: float
    starting: float
    fill: float
    basis: str

    @property
    def total(self) -> float:
        return self.matrix + self.elementwise + self.attention + self.copies + self.starting


def duration_of(call: PageCall, trace: Trace, pools: PoolUse, rates: Rates) -> Duration:
    """Time of a call whose chunks cost what ``trace`` says."""
    fills, sweeps = float(call.filled), float(len(call.swept))
    last = call.chunks.span(call.chunks.number - 1)
    per_chunk = min(call.chunks.chunk_size, call.chunks.tokens)
    if call.chunks.number - 1 in call.swept:  # the last chunk is as long as the text leaves it
        sweeps = sweeps - 1 + (last[1] - last[0]) / per_chunk

    def seconds(work: Work, kept_bytes: int) -> tuple[float, float, float]:
        matrix = work.flops / rates.matrix
        rest = work.moved_bytes / rates.traffic + kept_bytes / rates.fresh
        start = work.operations * rates.operation
        hidden = matrix + rest if call.device_type == "cuda" else 0.0
        return matrix, rest, max(0.0, start - hidden)

    fill = seconds(trace.fill, trace.fill_peak_bytes)
    sweep = seconds(trace.sweep, trace.sweep_peak_bytes - trace.sum_bytes)
    fill_attention = _attention(call, rates, range(call.filled), backward=False)
    attention = fill_attention + _attention(call, rates, call.swept, backward=True)
    matrix, elementwise, starting = (
        fills * f + sweeps * s for f, s in zip(fill, sweep, strict=True)
    )
    computing = matrix + elementwise + attention
    copying = max(pools.h2d_bytes, pools.d2h_bytes) / rates.link
    return Duration(
        matrix=matrix,
        elementwise=elementwise,
        attention=attention,
        copies=max(0.0, copying - 0.9 * computing) if copying else 0.0,
        starting=starting,
        fill=fills * sum(fill) + fill_attention,
        basis=rates.basis,
    )


def _attention(
    call: PageCall, rates: Rates, chunks: range | tuple[int, ...], *, backward: bool
) -> float:
    """Seconds of attention in a sweep of ``chunks``, or in their fill, which skips the last layer.

    A window's keys are masked for some of a chunk's queries, as the chunk's own are.
    """
    own, past = _pairs(call, chunks, skip_last_layer=not backward)
    seconds = 4.0 * (own / rates.own_forward + past / rates.past_forward)
    if backward:
        seconds += 10.0 * (own / rates.own_backward + past / rates.past_backward)
    return seconds


def _pairs(
    call: PageCall, chunks: range | tuple[int, ...], *, skip_last_layer: bool
) -> tuple[float, float]:
    """Sum over layers, heads and chunks of (query, key) pairs times head_dim: keys of the chunk
    itself (or in a window), and earlier ones."""
    shapes = call.shapes[:-1] if skip_last_layer else call.shapes
    budget = call.selection.budget * call.chunks.page_size if call.selection else None
    totals = [0.0, 0.0]
    for window in {shape.window for shape in shapes}:
        width = sum(s.query_heads * s.head_dim for s in shapes if s.window == window)
        for chunk in chunks:
            begin, end = call.chunks.span(chunk)
            tokens, past = end - begin, begin
            own = tokens * (tokens + 1) / 2
            if window:
                totals[0] += width * min(own + tokens * past, tokens * float(window))
            else:
                totals[0] += width * own
                totals[1] += width * tokens * (past if budget is None else min(past, budget))
    return totals[0] * call.batch, totals[1] * call.batch
