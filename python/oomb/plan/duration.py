"""Seconds of a step: each kind of work at its rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from oomb.model.layer_shape import LayerShape
from oomb.plan.dry_run import DryRunResult
from oomb.plan.host_time import host_seconds
from oomb.plan.pages import PageCall
from oomb.plan.pools import PoolUse
from oomb.plan.rates import WIDEST, Rates
from oomb.plan.timeline import Phase, waiting_seconds
from oomb.trace.meter import Work
from oomb.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of ``forward_backward`` by kind of work.

    Attributes:
        matrix: matrix products outside attention.
        elementwise: everything else that torch computes.
        attention: attention's kernels.
        copies: time that the rest waits for copies between the tiers.
        starting: what starting operations takes beyond what they take themselves.
        exchange: with other ranks of the sequence.
        images: their tower, before the chunks and after them.
        weights: time that the rest waits for weights from the host.
        weights_hidden_from: tokens of a chunk from which it never waits for them, whatever
            attention takes; 0: no weights are on the host.
        sums: time that the rest waits for gradient sums that the host keeps.
        sums_hidden_from: tokens of a chunk from which no chunk waits for them, whatever attention
            takes; 0: none are on the host.
        fill: seconds of the fill, of the total.
        spared: that kept outputs spare, of attention and of MLPs; no part of the total.
        basis: ``"measured"``, ``"datasheet"`` or ``"given"``, the origin of the rates.
    """

    matrix: float
    elementwise: float
    attention: float
    copies: float
    starting: float
    fill: float
    basis: str
    spared: float = 0.0
    exchange: float = 0.0
    images: float = 0.0
    weights: float = 0.0
    weights_hidden_from: int = 0
    sums: float = 0.0
    sums_hidden_from: int = 0

    @property
    def total(self) -> float:
        computing = self.matrix + self.elementwise + self.attention
        waiting = self.copies + self.weights + self.sums
        return computing + waiting + self.starting + self.exchange + self.images


def duration_of(
    call: PageCall,
    trace: Trace,
    pools: PoolUse,
    rates: Rates,
    *,
    again: float,
    exchange: float = 0.0,
    images: float = 0.0,
) -> Duration:
    """Time of a call whose chunks cost what ``trace`` says.

    Args:
        again: share of the swept chunks whose layers backward computes again.
    """
    fills, sweeps = float(call.filled), float(len(call.swept))
    last = call.chunks.span(call.chunks.number - 1)
    per_chunk = min(call.chunks.chunk_size, call.chunks.tokens)
    if call.chunks.number - 1 in call.swept:  # the last chunk is as long as the text leaves it
        sweeps = sweeps - 1 + (last[1] - last[0]) / per_chunk

    def seconds(work: Work, kept_bytes: int) -> tuple[float, float]:
        rest = work.moved_bytes / rates.traffic + kept_bytes / rates.fresh
        return work.flops / rates.matrix, rest

    fill = seconds(trace.fill, trace.fill_peak_bytes)
    sweep = seconds(trace.sweep, trace.sweep_peak_bytes - trace.sum_bytes)
    filling_shapes = call.shapes[: call.layers.fill_attends]
    fill_attention = forward_seconds(call, rates, range(call.filled), filling_shapes)
    sweep_attention = forward_seconds(call, rates, call.swept, call.shapes)
    spared, spared_mlps = _spared(call, rates), _spared_of_mlps(call, rates)
    sweep_attention -= spared
    sweep_attention += backward_seconds(call, rates, call.swept, call.shapes)
    filling = fills * sum(fill) + fill_attention
    sweeping = sweeps * sum(sweep) - spared_mlps + sweep_attention
    copies, spilled = 0.0, pools.dry_run is not None
    if pools.dry_run is not None:
        of_sweep = sum(sweep) - spared_mlps / max(1.0, sweeps)
        copies = _waiting(call, rates, pools.dry_run, sum(fill), of_sweep)
    of_fill, of_sweep = host_seconds(call, trace, rates, again=again, spilled=spilled)
    starting = [fills * of_fill, len(call.swept) * of_sweep]
    if call.device_type == "cuda":  # while earlier kernels run
        starting = [max(0.0, starting[0] - filling), max(0.0, starting[1] - sweeping)]
    return Duration(
        matrix=fills * fill[0] + sweeps * sweep[0] - spared_mlps,
        elementwise=fills * fill[1] + sweeps * sweep[1],
        attention=fill_attention + sweep_attention,
        copies=copies,
        starting=sum(starting),
        fill=filling + starting[0],
        basis=rates.basis,
        spared=spared + spared_mlps,
        exchange=exchange,
        images=images,
    )


def _spared(call: PageCall, rates: Rates) -> float:
    """Forward of attention whose outputs the fill has kept."""
    if call.outputs is None:
        return 0.0
    return sum(
        forward_seconds(call, rates, tuple(np.flatnonzero(call.outputs.kept[:, layer])), (shape,))
        for layer, shape in enumerate(call.shapes)
    )


def _spared_of_mlps(call: PageCall, rates: Rates) -> float:
    """The last products of MLPs whose outputs the fill has kept."""
    if call.outputs is None or call.outputs.kept_mlp is None:
        return 0.0
    flops = [
        0.0 if m is None else 2.0 * m.inputs / m.element_bytes * m.chunk_bytes for m in call.mlps
    ]
    return float((call.outputs.kept_mlp @ np.array(flops)).sum()) / rates.matrix


def _waiting(
    call: PageCall, rates: Rates, dry_run: DryRunResult, fill: float, sweep: float
) -> float:
    """Time that kernels wait for copies; ``fill`` and ``sweep`` of a chunk without attention."""
    layers = len(call.shapes)

    @cache
    def computing(phase: Phase, chunk: int) -> float:
        attention = backward_seconds if phase == "accumulate" else forward_seconds
        thirds = {"read": 1, "kept": 1, "accumulate": 2}
        own = fill if phase == "fill" else thirds[phase] * sweep / 3
        attending = 0.0 if phase == "kept" else attention(call, rates, (chunk,), call.shapes)
        of_layer = (own + attending) / layers
        return of_layer * dry_run.layers_each

    return waiting_seconds(
        dry_run.visits,
        lambda visit: computing(visit.phase, visit.chunk),
        link=rates.link,
        latency=rates.latency * dry_run.layers_each,
        paired=call.selection is not None,
    )


def forward_seconds(
    call: PageCall, rates: Rates, chunks: Sequence[int], shapes: Sequence[LayerShape]
) -> float:
    """Seconds of attention of ``chunks`` in layers of ``shapes``."""
    own, past = _pairs(call, rates, chunks, shapes)
    seconds = 4.0 * (own / rates.own_forward + past / rates.past_forward)
    return seconds + _expansion(call, chunks, shapes) / rates.matrix


def backward_seconds(
    call: PageCall, rates: Rates, chunks: Sequence[int], shapes: Sequence[LayerShape]
) -> float:
    """The same of its backward."""
    own, past = _pairs(call, rates, chunks, shapes)
    seconds = 10.0 * (own / rates.own_backward + past / rates.past_backward)
    # The past is expanded again; then come the products for latents and for weights.
    return seconds + 3 * _expansion(call, chunks, shapes) / rates.matrix


def _expansion(call: PageCall, chunks: Sequence[int], shapes: Sequence[LayerShape]) -> float:
    """FLOP of making the past's keys and values of latents, once."""
    of_token = sum(2 * s.latent * 2 * s.query_heads * s.head_dim for s in shapes)
    return float(of_token * call.batch * sum(call.chunks.past_tokens(chunk) for chunk in chunks))


def _pairs(
    call: PageCall, rates: Rates, chunks: Sequence[int], shapes: Sequence[LayerShape]
) -> tuple[float, float]:
    """Sum over layers, heads and chunks of (query, key) pairs times head_dim, and what that costs.

    First those whose keys are partly masked, in the chunk itself or in a window; then earlier ones.
    """
    budget = call.selection.max_pages * call.chunks.page_size if call.selection else None
    totals = [0.0, 0.0]
    for window in {shape.window for shape in shapes}:
        widths = [
            (s, s.query_heads * s.head_dim * (rates.widest_cost if s.head_dim >= WIDEST else 1.0))
            for s in shapes
            if s.window == window
        ]
        width = sum(of_shape for _, of_shape in widths)
        # Of divided pages the chunk's own rank has all queries of a head; the others wait for it.
        own_width = sum(x * (s.copies if s.divided else 1) for s, x in widths)
        for chunk in chunks:
            begin, end = call.chunks.span(chunk)
            tokens, past = end - begin, begin
            own = tokens * (tokens + 1) / 2
            if window:
                totals[0] += width * min(own + tokens * past, tokens * float(window))
            else:
                totals[0] += own_width * own
                totals[1] += width * tokens * (past if budget is None else min(past, budget))
    return totals[0] * call.batch, totals[1] * call.batch
