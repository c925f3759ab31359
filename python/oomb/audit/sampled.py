"""The spread of SpaCO's gradient estimate."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from oomb.audit.gradients import (
    KEPT_SUMS,
    Gradients,
    Groups,
    gradients_of_call,
    products,
    squared_distances,
)
from oomb.audit.results import SampledAudit, Spread
from oomb.config import Config, SampledChunks
from oomb.engine.engine import Engine

Subset = tuple[int, ...]


def _drawing(rule: SampledChunks, subsets: Sequence[Subset]) -> SampledChunks:
    """A rule, its factors too, but that it sweeps the subsets it is given, one per call."""

    class Given(type(rule)):  # type: ignore[misc]
        def draw(self, num_chunks: int, step: int) -> list[int]:
            return list(subsets[step])

    given = copy.copy(rule)
    object.__setattr__(given, "__class__", Given)
    return given


def subsets_of(
    rule: SampledChunks, num_chunks: int, draws: int
) -> tuple[dict[Subset, float], bool]:
    """Subsets of the chunks with their weights, and whether they are all there are.

    Where there are no more subsets than ``draws``, each has its probability, if the rule draws each
    chunk by itself, as :class:`oomb.SampledChunks` does.
    """
    own = type(rule).draw is not SampledChunks.draw
    if 2**num_chunks <= draws and not own:
        every = itertools.chain.from_iterable(
            itertools.combinations(range(num_chunks), size) for size in range(num_chunks + 1)
        )
        p = rule.keep
        weights = {s: p ** len(s) * (1 - p) ** (num_chunks - len(s)) for s in every}
        return {s: w for s, w in weights.items() if w > 0}, True
    weights = {}
    for step in range(draws):
        subset = tuple(rule.draw(num_chunks, step))
        weights[subset] = weights.get(subset, 0.0) + 1 / draws
    return weights, False


def audit_sampled(
    model: nn.Module,
    config: Config,
    rule: SampledChunks,
    groups: Groups,
    exact: Gradients,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_chunks: int,
    draws: int,
    on_call: Callable[[str], None],
) -> SampledAudit:
    """Gradients of a rule's draws against the exact one."""
    weights, exhaustive = subsets_of(rule, num_chunks, draws)
    settings = {**vars(config), "backward": _drawing(rule, tuple(weights)), **KEPT_SUMS}
    mean = {name: torch.zeros_like(value) for name, value in exact.items()}  # of estimate - exact
    squares = dict.fromkeys(exact, 0.0)
    losses, errors = [], []
    exact_norm = sum(products(exact, exact).values()) ** 0.5
    with Engine(model, Config(**settings)) as engine:
        for subset, weight in weights.items():
            on_call(f"{_name(rule)}, chunks {list(subset)}")
            step, found = gradients_of_call(engine, groups, input_ids, labels)
            distances = squared_distances(found, exact)
            for name, distance in distances.items():
                squares[name] += weight * distance
                mean[name] += weight * (found[name] - exact[name])
            losses.append(float(step.loss))
            errors.append(sum(distances.values()) ** 0.5 / exact_norm)
    biases, norms = products(mean, mean), products(exact, exact)
    layers: list[Spread | None] = []
    columns = [groups.sums(values) for values in (squares, biases, norms)]
    correction = 1.0 if exhaustive else draws / (draws - 1)  # of a random sample's variance
    for layer in zip(*(column for column, _ in columns), strict=True):
        sums = [value for value in layer if value is not None]
        layers.append(_spread(*sums, correction=correction) if sums else None)
    return SampledAudit(
        rule=rule,
        draws=len(weights) if exhaustive else draws,
        exhaustive=exhaustive,
        gradient=_spread(*(total for _, total in columns), correction=correction),
        layers=layers,
        losses=losses,
        errors=errors,
        weights=list(weights.values()),
    )


def _spread(square: float, bias: float, norm: float, *, correction: float) -> Spread:
    """From E‖g − e‖², ‖E g − e‖² and ‖e‖²."""
    if norm == 0.0:
        return Spread(bias=0.0, spread=0.0, error=0.0)
    variance = correction * max(0.0, square - bias)
    return Spread(
        bias=(bias / norm) ** 0.5,
        spread=(variance / norm) ** 0.5,
        error=(square / norm) ** 0.5,
    )


def _name(rule: SampledChunks) -> str:
    return f"keep={rule.keep:g}" + ("" if rule.cap is None else f", cap={rule.cap:g}")
