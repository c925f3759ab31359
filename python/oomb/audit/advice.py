"""What the figures of an audit recommend, in a few sentences each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oomb.audit.results import (
    RoundedAudit,
    SampledAudit,
    SparseAudit,
    TruncatedAudit,
    budget_of,
)
from oomb.config import TopKPages

# docs/quality.md measured all three: means lost needles that bounds found; the share of attention
# seen was larger where needles were lost; errors of 40 % went with answers that were all right.
_MEANS = (
    " It ranks pages by the means of their keys, which can lose the one key that counts: "
    "try summary bounds with score token_softmax."
)
_ASK = " Confirm a budget by questions about what is far back, asked under it (docs/quality.md)."


def advice(
    sparse: Sequence[SparseAudit],
    sampled: Sequence[SampledAudit],
    tolerance: float,
    truncated: Sequence[TruncatedAudit] = (),
    rounded: RoundedAudit | None = None,
) -> list[str]:
    """At most one text each about budgets, sampled chunks, truncated chunks and rounded pages."""
    found = []
    if sparse:
        found.append(_about_budgets(sparse, tolerance))
    if sampled:
        found.append(_about_sampling(sampled, tolerance))
    if truncated:
        found.append(_about_windows(truncated, tolerance))
    if rounded is not None:
        found.append(_about_rounding(rounded, tolerance))
    return found


def _about_budgets(sparse: Sequence[SparseAudit], tolerance: float) -> str:
    ordered = sorted(sparse, key=lambda one: (one.rule.max_pages, one.gradient.error))
    tried = ", ".join(budget_of(one.rule) for one in ordered)
    within = [one for one in ordered if one.gradient.error <= tolerance]
    if within:
        best = within[0]
        smallest = "smallest" if len(ordered) > 1 else "one"
        return (
            f"Budget {budget_of(best.rule)} is the {smallest} of {tried} whose gradient stays "
            f"within {tolerance:.0%} of the exact one ({best.gradient.error:.1%} off)."
            f"{_MEANS if _by_means(best) else ''}{_ASK}"
        )
    best = min(ordered, key=lambda one: one.gradient.error)
    return (
        f"No budget of {tried} keeps the gradient within {tolerance:.0%} of the exact one: the "
        f"nearest, {budget_of(best.rule)}, is {best.gradient.error:.1%} off. Try more, or stay "
        f"exact.{_MEANS if _by_means(best) else ''}{_ASK}"
    )


def _by_means(one: SparseAudit) -> bool:
    return isinstance(one.rule, TopKPages) and one.rule.summary == "mean"


def _noise(one: SampledAudit) -> float:
    """What averaging removes. Without a cap that is all of the error; draws that happen to be alike
    have less of a spread."""
    return max(one.gradient.error, one.gradient.spread)


def _about_sampling(sampled: Sequence[SampledAudit], tolerance: float) -> str:
    """The unbiased rule that averages out for the least work, and what a cap would change."""
    free = [one for one in sampled if not _is_capped(one)]
    capped = [one for one in sampled if _is_capped(one)]
    sentences = []
    if free:
        best = min(free, key=lambda one: one.rule.keep * _noise(one) ** 2)
        steps = max(1, math.ceil((_noise(best) / tolerance) ** 2))
        bring = "1 step brings" if steps == 1 else f"{steps:,} steps bring"
        sentences.append(
            f"Without a cap keep={best.rule.keep:g} averages out for the least work: a step's "
            f"gradient is {best.gradient.error:.0%} off, and {bring} that to "
            f"{tolerance:.0%}."
        )
    if capped:
        best = min(capped, key=lambda one: one.rule.keep * one.gradient.error**2)
        known = "" if best.exhaustive else f" (± {best.gradient.spread / best.draws**0.5:.0%})"
        sentences.append(
            f"A cap of {best.rule.cap:g} at keep={best.rule.keep:g} has single steps "
            f"{best.gradient.error:.0%} off, of which a bias of {best.gradient.bias:.0%}{known} "
            "stays however many are averaged."
        )
    return " ".join(sentences)


def _about_windows(truncated: Sequence[TruncatedAudit], tolerance: float) -> str:
    ordered = sorted(truncated, key=lambda one: one.rule.window)
    tried = ", ".join(str(one.rule.window) for one in ordered)
    within = [one for one in ordered if one.gradient.error <= tolerance]
    best = within[0] if within else min(ordered, key=lambda one: one.gradient.error)
    off = f"{best.gradient.error:.1%} off the whole one, in every step alike"
    if within:
        smallest = "smallest" if len(ordered) > 1 else "one"
        return (
            f"A window of {best.rule.window} chunks is the {smallest} of {tried} whose gradient "
            f"stays within {tolerance:.0%} ({off})."
        )
    return (
        f"No window of {tried} chunks keeps the gradient within {tolerance:.0%}: the nearest, "
        f"{best.rule.window}, is {off}."
    )


def _about_rounding(rounded: RoundedAudit, tolerance: float) -> str:
    error = rounded.gradient.error
    if error == 0.0:
        return f"Gradient pages are not in {rounded.kv_grad_dtype} here: keys are in a wider dtype."
    within = "within" if error <= tolerance else "beyond"
    return (
        f"With gradient pages in {rounded.kv_grad_dtype} a step's gradient is {error:.2%} off, "
        f"{within} {tolerance:.0%}. The rounding is random and without bias: averaging removes it."
    )


def _is_capped(one: SampledAudit) -> bool:
    return one.rule.cap is not None and one.rule.cap < 1 / one.rule.keep
