"""Which outputs of MLPs a call could keep, by layer of its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from oomb.core.keeping import MlpOutput
from oomb.model.layer_shape import LayerShape


def paged_mlps(paged: Mapping[int, int], groups: int) -> dict[int, int]:
    """By decoder layer with attention: the layer of the pages at which its MLP's output lies.

    Args:
        paged: of :class:`oomb.model.causal.CausalModel`.
        groups: of a layer's heads, each of which is a layer of the pages.
    """
    return {layer: groups * (number + 1) - 1 for layer, number in paged.items()}


def mlp_outputs(
    products: Sequence[nn.Linear | None],
    paged: Mapping[int, int],
    shapes: Sequence[LayerShape],
    *,
    batch: int,
    chunk_size: int,
    ranks: int,
) -> tuple[MlpOutput | None, ...]:
    """What the last products give of a full chunk; nothing where ranks run slices of two sizes.

    Args:
        products: of :func:`oomb.model.last_product.last_products`.
        paged: as of :func:`paged_mlps`.
    """
    found: list[MlpOutput | None] = [None] * len(shapes)
    if chunk_size % ranks:
        return tuple(found)
    places, rows = paged_mlps(paged, shapes[0].groups), batch * chunk_size // ranks
    for layer, product in enumerate(products):
        if product is not None and layer in places:
            size = product.weight.element_size()
            of_chunk = rows * product.out_features * size
            found[places[layer]] = MlpOutput(product.in_features, size, of_chunk)
    return tuple(found)
