"""Seconds that the host takes to start a chunk's kernels, which a GPU may outrun."""

from __future__ import annotations

from oomb.model.layer_shape import LayerShape
from oomb.plan.pages import PageCall
from oomb.plan.rates import Rates
from oomb.trace.trace import Trace

# Per layer beside the operations that torch counts, on the host of an H200: the page manager, the
# engine's autograd functions, checkpoints; lists of chosen pages, and their way to the host.
_FORWARD, _BACKWARD, _RECOMPUTE = 0.55e-3, 1.5e-3, 2.2e-3
_CHOICE, _LISTS = 0.5e-3, 1.0e-3
# With other ranks, forward and backward: exchanges (bench/peer_copies.py has what they take alone);
# copies of heads, or pages that ranks divide; a choice for heads that ranks share. The last three
# are fitted to sparse steps of four GPUs with 2,048 tokens of a chunk each, which waited for their
# hosts (bench/results/step-qwen2.5-3b-copied-heads-h200-2026-11-27.json). Divided pages have not
# been timed since exchanges take fewer operations, which is taken off here.
_EXCHANGE = 0.35e-3, 0.25e-3
_COPIES, _DIVIDED = (1.1e-3, 1.35e-3), (1.6e-3, 1.15e-3)
_SHARED_CHOICE = 0.6e-3


def host_seconds(
    call: PageCall, trace: Trace, rates: Rates, *, again: float, spilled: bool
) -> tuple[float, float]:
    """Of a chunk in the fill, and in the sweep, where ``again`` of them compute layers twice."""
    fill, sweep = (work.operations * rates.operation for work in (trace.fill, trace.sweep))
    if call.device_type == "cpu":
        return fill, sweep
    lists = _LISTS if spilled and call.selection is not None else 0.0
    choice = _CHOICE if call.selection is not None else 0.0
    layers = len(call.shapes)
    fill += layers * (_FORWARD + choice + lists)
    sweep += layers * (_FORWARD + _BACKWARD + again * _RECOMPUTE + lists)
    if call.ranks > 1:
        for shape in call.shapes:
            forward, backward = _beside_ranks(shape)
            shared = shape.copies > 1 and call.selection is not None
            fill += forward + shared * _SHARED_CHOICE
            sweep += (1 + again) * forward + backward
    return fill, sweep


def _beside_ranks(shape: LayerShape) -> tuple[float, float]:
    """What a layer takes more where others have parts of the sequence, forward and backward."""
    parts = [_EXCHANGE]
    if shape.copies > 1:
        parts.append(_DIVIDED if shape.divided else _COPIES)
    return sum(part[0] for part in parts), sum(part[1] for part in parts)
