"""Which outputs of MLPs a call could keep, by layer of its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oomb.core.keeping import MlpOutput
from oomb.model.last_product import ProductShape
from oomb.model.layer_shape import LayerShape


def paged_mlps(paged: Mapping[int, int], groups: int) -> dict[int, int]:
    """By decoder layer with attention: the layer of the pages at which its MLP's output lies.

    Args:
        paged: of :class:`oomb.model.causal.CausalModel`.
        groups: of a layer's heads, each of which is a layer of the pages.
    """
    return {layer: groups * (number + 1) - 1 for layer, number in paged.items()}


def mlp_outputs(
    products: Sequence[ProductShape | None],
    paged: Mapping[int, int],
    shapes: Sequence[LayerShape],
    *,
    batch: int,
    chunk_size: int,
    ranks: int,
    recurrent: bool,
) -> tuple[MlpOutput | None, ...]:
    """What the last products give of a full chunk; nothing where ranks run slices of two sizes, or
    some layers on all of a chunk.

    Args:
        products: of :func:`oomb.model.last_product.last_products`.
        paged: as of :func:`paged_mlps`.
        recurrent: the model hands states on.
    """
    found: list[MlpOutput | None] = [None] * len(shapes)
    if chunk_size % ranks or (recurrent and ranks > 1):
        return tuple(found)
    places, rows = paged_mlps(paged, shapes[0].groups), batch * chunk_size // ranks
    for layer, product in enumerate(products):
        if product is not None and layer in places:
            size = product.element_bytes
            of_chunk = rows * product.outputs * size
            found[places[layer]] = MlpOutput(product.inputs, size, of_chunk)
    return tuple(found)


def alike(of_ranks: Sequence[tuple[MlpOutput | None, ...]]) -> tuple[MlpOutput | None, ...]:
    """What all ranks could keep: it decides the sizes of pools, which are the same on all."""
    of_layers = zip(*of_ranks, strict=True)
    return tuple(of[0] if len(set(of)) == 1 else None for of in of_layers)
