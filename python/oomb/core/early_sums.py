"""Gradient sums over ranks that begin while the sweep's last chunk is still propagated back.

Nothing adds to a layer's sums once that chunk has come past the layer; nor to the head's:

    compute     last chunk swept: [ head, layer 5 ][ layer 4       ][ layer 3 ] … [ embedding ]
    exchanges                                      [ sums of these ][ of 4    ] …     ▸ the rest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from oomb.core.chunk_run import current_run
from oomb.core.host_sums import own_parameters
from oomb.core.later_products import LaterProducts
from oomb.core.main_grad import MainGrads
from oomb.parallel.placement import Placement


class EarlySums:
    """Sums of whole layers of a call.

    Args:
        products: that may wait.
        layers: of the decoder.
        causal: the model around them.
        last: chunk that is swept last.
    """

    def __init__(
        self,
        grads: MainGrads,
        products: LaterProducts,
        placement: Placement,
        layers: Sequence[nn.Module],
        causal: nn.Module,
        last: int,
    ) -> None:
        self._grads = grads
        self._products = products
        self._placement = placement
        self._layers = layers
        self._causal = causal
        self._last = last
        self._of_layer: list[list[nn.Parameter]] | None = None

    def watch(self, layer: int, given: object) -> None:
        """A layer is about to run on hidden states. Once their gradient is there it is done."""
        run = current_run()
        if run.phase != "sweep" or run.chunk != self._last:
            return
        if self._of_layer is None:
            self._of_layer = self._met_by_all()
        # The first layer's are summed at the end, with those of what comes before it: whether its
        # input has a gradient depends on what a rank is given (images, of those whose embedding is
        # frozen). That of the others does not.
        if layer == 0 or not isinstance(given, torch.Tensor) or given.grad_fn is None:
            return
        if self._of_layer[layer]:
            given.register_hook(partial(self._begin, self._of_layer[layer]))

    def _met_by_all(self) -> list[list[nn.Parameter]]:
        """Of each layer what earlier chunks have reached on every rank: nothing, if there are
        none."""
        own = parameters_done_with(self._layers, self._causal)
        met = self._placement.collect(lambda: [self._grads.has_sums(of_layer) for of_layer in own])
        return [
            [p for p, *on_ranks in zip(of_layer, *of_ranks, strict=True) if all(on_ranks)]
            for of_layer, *of_ranks in zip(own, *met, strict=True)
        ]

    def _begin(self, parameters: list[nn.Parameter], _: torch.Tensor) -> None:
        self._products.finish()
        self._grads.sum_early(self._placement, parameters)


def parameters_done_with(layers: Sequence[nn.Module], causal: Any) -> list[list[nn.Parameter]]:
    """Trained parameters that a backward is done with where it has come past a layer, and that
    nothing else has: the layer's own, of the last one the head's too."""
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in causal.modules() if module not in inside]
    users = Counter(p for module in outside for p in module.parameters(recurse=False))
    own = [[p for p in of_layer if not users[p]] for of_layer in own_parameters(layers)]
    head = causal.get_output_embeddings()
    if head is not None:
        of_layers = {p for layer in layers for p in layer.parameters()}
        trained = [p for p in head.parameters() if p.requires_grad and p not in of_layers]
        own[-1] += [p for p in trained if users[p] == 1]
    return own
