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
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from oomb.model.adapters import AdaptedForward, Products, runs_beside
from oomb.model.linear import Known, TakesSum, known_forward, may_be_known
from oomb.model.swap import Swaps, swapping

_LONGER = 2  # times as many inputs as outputs, at least
_ADAPTED = "base_layer"  # PEFT's name for a layer that an adapter stands beside


@dataclass(frozen=True)
class ProductShape:
    """Values of a row, and bytes of a value of the output."""

    inputs: int
    outputs: int
    element_bytes: int


@dataclass(frozen=True)
class LastProduct:
    """A product whose output can be kept.

    Attributes:
        module: whose forward makes it; with an adapter beside it where both are one function.
    """

    module: nn.Module
    shape: ProductShape


class MlpOutputs(Protocol):
    """Keeps outputs in the fill, and gives each back once."""

    def takes_part(self, layer: int) -> bool:
        """Whether the output of the chunk that is run is one that is kept."""

    def keep(self, layer: int, y: torch.Tensor) -> None:
        """Of the fill; its first of a chunk and layer counts."""

    def take(self, layer: int, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Of the sweep: gives what was kept of rows like ``x``; None: it has to be computed."""


def last_products(
    layers: Sequence[nn.Module], takes: TakesSum, adapters: Products | None
) -> list[LastProduct | None]:
    """Of each decoder layer; None: it has none of its own, or more than one that it could be.

    Args:
        takes: as of :func:`may_be_known`.
        adapters: as of :func:`adapter_forwards`; None: PEFT's own forwards run.
    """
    found = [_last_product(layer, takes, adapters) for layer in layers]
    uses = Counter(None if product is None else product.module for product in found)
    return [product if product and uses[product.module] == 1 else None for product in found]


def _last_product(
    layer: nn.Module, takes: TakesSum, adapters: Products | None
) -> LastProduct | None:
    linears = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
    sizes = Counter((m.in_features, m.out_features) for m in linears.values())
    inputs, outputs = max(sizes, default=(0, 1))
    if sizes[inputs, outputs] != 1 or inputs < _LONGER * outputs:
        return None
    longest = [(n, m) for n, m in linears.items() if m.in_features == inputs]
    ((name, module),) = [(n, m) for n, m in longest if m.out_features == outputs]
    if len(longest) > 1 and not all(_is_beside(name, n) for n, _ in longest):
        return None
    if _has_changing_weight(layer, name):
        return None
    owner, _, own = name.rpartition(".")
    if own == _ADAPTED and adapters is not None:
        adapted = layer.get_submodule(owner)
        if runs_beside(adapted, adapters):
            return LastProduct(adapted, ProductShape(inputs, outputs, torch.bfloat16.itemsize))
    if not may_be_known(module, takes):
        return None
    return LastProduct(module, ProductShape(inputs, outputs, module.weight.element_size()))


def _has_changing_weight(layer: nn.Module, name: str) -> bool:
    """Whether PEFT's ``target_parameters`` give a product another weight while a forward runs."""
    places = [place for place, letter in enumerate(name) if letter == "."]
    return any(hasattr(layer.get_submodule(name[:place]), "parameter_name") for place in places)


def _is_beside(base: str, name: str) -> bool:
    """Whether a layer is the base itself, or part of the adapter beside it (lora_A)."""
    owner = base.removesuffix(_ADAPTED)
    return name == base or (owner != base and name.startswith(owner))


@swapping
def kept_products(
    swaps: Swaps, products: Sequence[LastProduct | None], outputs: MlpOutputs
) -> None:
    """Inside, outputs of ``products`` are kept and taken. Forwards that are replaced already stay
    in use."""
    for layer, product in enumerate(products):
        known = None if product is None else _known_forward(product.module)
        if product is not None and known is not None:
            plain = product.module.forward
            swaps.replace(product.module, "forward", _KeptForward(layer, plain, known, outputs))


def _known_forward(module: nn.Module) -> Callable[[torch.Tensor, Known], torch.Tensor] | None:
    forward = vars(module).get("forward")
    if isinstance(forward, AdaptedForward):
        return lambda x, known: forward(x, known=known)
    return known_forward(module) if isinstance(module, nn.Linear) else None


class _KeptForward:
    """A product's forward in a call.

    Args:
        plain: without what is kept.
        known: of :func:`known_forward`.
    """

    def __init__(
        self,
        layer: int,
        plain: Callable[..., torch.Tensor],
        known: Callable[[torch.Tensor, Known], torch.Tensor],
        outputs: MlpOutputs,
    ) -> None:
        self._layer, self._plain, self._known, self._outputs = layer, plain, known, outputs

    def __call__(self, x: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        other = args or keywords or torch.is_autocast_enabled(x.device.type)  # a layer's own
        if other or not self._outputs.takes_part(self._layer):
            return self._plain(x, *args, **keywords)
        if torch.is_grad_enabled():
            # In a layer that is computed again, both times: torch compares what they save.
            return self._known(x, self._outputs.take(self._layer, x))
        y = self._plain(x)
        self._outputs.keep(self._layer, y)
        return y
