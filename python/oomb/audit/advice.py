"""What the figures of an audit recommend, in a sentence each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oomb.audit.results import SampledAudit, SparseAudit


def advice(
    sparse: Sequence[SparseAudit], sampled: Sequence[SampledAudit], tolerance: float
) -> list[str]:
    """At most one sentence about budgets and one about sampled chunks."""
    found = []
    if sparse:
        found.append(_about_budgets(sparse, tolerance))
    if sampled:
        found.append(_about_sampling(sampled, tolerance))
    return found


def _about_budgets(sparse: Sequence[SparseAudit], tolerance: float) -> str:
    ordered = sorted(sparse, key=lambda one: one.rule.budget)
    tried = ", ".join(str(one.rule.budget) for one in ordered)
    within = [one for one in ordered if one.gradient.error <= tolerance]
    if within:
        best = within[0]
        smallest = "smallest" if len(ordered) > 1 else "one"
        return (
            f"Budget {best.rule.budget} is the {smallest} of {tried} whose gradient stays within "
            f"{tolerance:.0%} of the exact one ({best.gradient.error:.1%} off)"
            f"{_weakest_layer(best)}."
        )
    best = min(ordered, key=lambda one: one.gradient.error)
    return (
        f"No budget of {tried} keeps the gradient within {tolerance:.0%} of the exact one: the "
        f"nearest, {best.rule.budget}, is {best.gradient.error:.1%} off"
        f"{_weakest_layer(best)}. Try more, or stay exact."
    )


def _weakest_layer(one: SparseAudit) -> str:
    masses = [(m.mass, layer) for layer, m in enumerate(one.layers) if m.mass is not None]
    if not masses:
        return ""
    mass, layer = min(masses)
    return f"; its blocks see at least {mass:.1%} of the attention (layer {layer})"


def _about_sampling(sampled: Sequence[SampledAudit], tolerance: float) -> str:
    """The rule of the least error for the chunks it sweeps, and what averaging would take."""
    best = min(sampled, key=lambda one: one.rule.keep * one.gradient.error**2)
    rule, found = best.rule, best.gradient
    name = f"keep={rule.keep:g}" + ("" if rule.cap is None else f", cap={rule.cap:g}")
    text = f"Of the sampled rules {name} has the least error for its work: a step's gradient is "
    text += f"{found.error:.0%} off"
    noise = found.spread / math.sqrt(best.draws)
    if rule.cap is not None and rule.cap < 1 / rule.keep:
        text += f", of which {found.bias:.0%} is bias that no averaging removes"
        if not best.exhaustive:
            text += f" (known to {noise:.0%})"
    steps = math.ceil((found.spread / tolerance) ** 2)
    if steps > 1:
        text += f"; {steps:,} steps average its noise down to {tolerance:.0%}"
    return text + "."
