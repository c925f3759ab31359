"""Seconds that the host takes to start a chunk's kernels, which a GPU may outrun."""

from __future__ import annotations

from oomb.plan.pages import PageCall
from oomb.plan.rates import Rates
from oomb.trace.trace import Trace

# Per layer beside the operations that torch counts, on the host of an H200: the page manager, the
# engine's autograd functions, checkpoints; lists of chosen pages, and their way to the host.
_FORWARD, _BACKWARD, _RECOMPUTE = 0.55e-3, 1.5e-3, 2.2e-3
_CHOICE, _LISTS = 0.5e-3, 1.0e-3


def host_seconds(
    call: PageCall, trace: Trace, rates: Rates, *, recompute: bool, spilled: bool
) -> tuple[float, float]:
    """Of a chunk in the fill, and in the sweep."""
    fill, sweep = (work.operations * rates.operation for work in (trace.fill, trace.sweep))
    if call.device_type == "cpu":
        return fill, sweep
    lists = _LISTS if spilled and call.selection is not None else 0.0
    choice = _CHOICE if call.selection is not None else 0.0
    layers = len(call.shapes)
    fill += layers * (_FORWARD + choice + lists)
    sweep += layers * (_FORWARD + _BACKWARD + recompute * _RECOMPUTE + lists)
    return fill, sweep
