"""Gradients of whole calls, kept apart from the model's own, and compared layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from oomb.audit.results import Likeness
from oomb.core.loop import OnProgress
from oomb.engine.engine import Engine
from oomb.results import Step

Gradients = dict[str, torch.Tensor]  # in host memory, fp32 (fp64 for fp64 models)

# Settings of an engine whose gradients are compared.
KEPT_SUMS: dict[str, Any] = {"main_grad_dtype": "float32", "keep_main_grad": True}
OTHERS = -1  # group of the parameters outside the decoder's layers


class Groups:
    """Which decoder layer each trained parameter belongs to."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        layer_of = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("model: expected parameters that require gradients, got none")
        self._group = {n: layer_of.get(id(p), OTHERS) for n, p in self.parameters.items()}
        self.num_layers = len(layers)

    def sums(self, values: dict[str, float]) -> tuple[list[float | None], float]:
        """Values of parameters summed per layer (None: no parameter), and over all."""
        per_layer: list[float | None] = [None] * self.num_layers
        for name, value in values.items():
            if self._group[name] != OTHERS:
                per_layer[self._group[name]] = (per_layer[self._group[name]] or 0.0) + value
        return per_layer, sum(values.values())


def gradients_of_call(
    engine: Engine,
    groups: Groups,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    on_progress: OnProgress | None = None,
) -> tuple[Step, Gradients]:
    """One ``forward_backward``; parameters that it does not reach have zeros.

    The engine needs :data:`KEPT_SUMS`, so that nothing is rounded to the parameters' dtype.
    """
    step = engine.forward_backward(input_ids, labels, on_progress=on_progress)
    gradients = {}
    for name, parameter in groups.parameters.items():
        parameter.grad = None  # rounded to the parameter's dtype, and room for the next call
        try:
            gradient = engine.main_grad(parameter)
        except ValueError:  # not reached
            gradient = torch.zeros_like(parameter, dtype=_wide(parameter))
        gradients[name] = gradient.detach().to("cpu", copy=True)
    return step, gradients


def products(a: Gradients, b: Gradients) -> dict[str, float]:
    """⟨a, b⟩ of each parameter, summed in fp64."""
    return {name: _dot(a[name], b[name]) for name in a}


def squared_distances(a: Gradients, b: Gradients) -> dict[str, float]:
    """‖a − b‖² of each parameter."""
    return {name: _dot(a[name] - b[name], a[name] - b[name]) for name in a}


def compare(
    groups: Groups, found: Gradients, exact: Gradients
) -> tuple[list[Likeness | None], Likeness]:
    """Likeness per layer (None: no trained parameter) and over all parameters."""
    columns = [
        groups.sums(products(found, exact)),
        groups.sums(products(found, found)),
        groups.sums(products(exact, exact)),
        groups.sums(squared_distances(found, exact)),
    ]
    per_layer: list[Likeness | None] = []
    for layer in zip(*(column for column, _ in columns), strict=True):
        values = [value for value in layer if value is not None]
        per_layer.append(likeness(*values) if values else None)
    return per_layer, likeness(*(total for _, total in columns))


def likeness(product: float, found: float, exact: float, distance: float) -> Likeness:
    """From ⟨x, y⟩, ‖x‖², ‖y‖² and ‖x − y‖². Where y is zero: 1 and 0 if x is, else 0 and ∞."""
    if exact == 0.0:
        return Likeness(1.0, 0.0) if found == 0.0 else Likeness(0.0, float("inf"))
    cosine = product / (found * exact) ** 0.5 if found > 0.0 else 0.0
    return Likeness(cosine, (distance / exact) ** 0.5)


def _wide(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(float(torch.dot(x.double(), y.double())) for x, y in _pieces(a, b))


def _pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Flat stretches, so that the copies in fp64 stay small."""
    size = 1 << 24
    a, b = a.reshape(-1), b.reshape(-1)
    for begin in range(0, a.numel(), size):
        yield a[begin : begin + size], b[begin : begin + size]
