"""The last product of a layer's MLP, whose output the fill can keep and the sweep take.

Backward needs a product's input and weight, not its output:

    fill    x ── gate, up ── product ── down ──▶ y ── …      y is kept
    sweep   x ── gate, up ── product ── (down)   y ── …      y is there, down computes nothing

It is found as the one product of a layer with the longest sums, so that a byte of its output saves
most work. In layers of many small experts that may be attention's output projection, of which the
same is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from oomb.model.linear import Known, WeightSums, known_forward, may_be_known
from oomb.model.swap import Swaps, swapping

_LONGER = 2  # times as many inputs as outputs, at least
_ADAPTED = "base_layer"  # PEFT's name for a layer that an adapter stands before


class MlpOutputs(Protocol):
    """Keeps outputs in the fill, and gives each back once."""

    def takes_part(self, layer: int) -> bool:
        """Whether the output of the chunk that is run is one that is kept."""

    def keep(self, layer: int, y: torch.Tensor) -> None:
        """Of the fill; its first of a chunk and layer counts."""

    def take(self, layer: int, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Of the sweep: gives what was kept of rows like ``x``; None: it has to be computed."""


def last_products(layers: Sequence[nn.Module], sums: WeightSums | None) -> list[nn.Linear | None]:
    """Of each decoder layer; None: it has none of its own, or more than one that it could be.

    Args:
        sums: as of :func:`may_be_known`.
    """
    found = [_last_product(layer, sums) for layer in layers]
    uses = Counter(found)
    return [product if uses[product] == 1 else None for product in found]


def _last_product(layer: nn.Module, sums: WeightSums | None) -> nn.Linear | None:
    linears = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
    longest = max((module.in_features for module in linears.values()), default=0)
    found = [(n, m) for n, m in linears.items() if m.in_features == longest]
    if len(found) != 1:
        return None
    ((name, module),) = found
    if _ADAPTED in name.split(".") or longest < _LONGER * module.out_features:
        return None
    return module if may_be_known(module, sums) else None


@swapping
def kept_products(swaps: Swaps, products: Sequence[nn.Linear | None], outputs: MlpOutputs) -> None:
    """Inside, outputs of ``products`` are kept and taken. Forwards that are replaced already stay
    in use."""
    for layer, module in enumerate(products):
        known = None if module is None else known_forward(module)
        if module is not None and known is not None:
            swaps.replace(module, "forward", _KeptForward(layer, module.forward, known, outputs))


class _KeptForward:
    """A product's forward in a call.

    Args:
        plain: without what is kept.
        known: of :func:`known_forward`.
    """

    def __init__(
        self,
        layer: int,
        plain: Callable[[torch.Tensor], torch.Tensor],
        known: Callable[[torch.Tensor, Known], torch.Tensor],
        outputs: MlpOutputs,
    ) -> None:
        self._layer, self._plain, self._known, self._outputs = layer, plain, known, outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._outputs.takes_part(self._layer):
            return self._plain(x)
        if torch.is_grad_enabled():
            # In a layer that is computed again, both times: torch compares what they save.
            return self._known(x, self._outputs.take(self._layer, x))
        y = self._plain(x)
        self._outputs.keep(self._layer, y)
        return y
