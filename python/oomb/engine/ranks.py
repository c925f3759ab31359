"""What ranks of one sequence ask of a model and of the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from oomb.config import Config
from oomb.core.layout import Chunks
from oomb.core.page_demand import rule_of
from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.layer_shape import LayerShape
from oomb.parallel.heads import HeadShares
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights
from oomb.parallel.whole import shard

T = TypeVar("T")


def shapes_here(shapes: list[LayerShape], ranks: int, config: Config) -> list[LayerShape]:
    """Attention of each layer, or group of its heads, with the heads that one of ``ranks`` holds.

    Pages hold latents where a layer has them, each rank all of them; but keys and values where a
    page rule chooses by these, and where those of a rank's heads take no more. Pages of windows are
    never divided: their number does not grow with the sequence.

    Raises:
        UnsupportedModelError: some rank would have no queries of its own, pages that shall be
            divided hold latents, or groups do not divide the heads of a rank.
    """
    shares = [HeadShares(s.query_heads, s.kv_heads, ranks) for s in shapes]
    if not all(of_layer.fits for of_layer in shares):
        heads = {(s.query_heads, s.kv_heads) for s in shapes}
        fitting = [n for n in range(1, ranks) if all(HeadShares(*x, n).fits for x in heads)]
        counts = " and ".join(f"{queries}/{keys}" for queries, keys in sorted(heads))
        raise UnsupportedModelError(
            f"mesh: expected ranks that can share the {counts} query/key heads of the model, got "
            f"{ranks} ranks, of which some would have no queries: share a sequence among "
            f"{', '.join(map(str, fitting))}"
        )
    stored = [layer if s.source is None else s.source for layer, s in enumerate(shapes)]
    windowed = {source for source, shape in zip(stored, shapes, strict=True) if shape.window}
    here = [
        replace(
            shape,
            query_heads=of_rank.queries,
            kv_heads=of_rank.keys,
            copies=of_rank.copies,
            divided=config.divide_pages and of_rank.copies > 1 and source not in windowed,
            latent=shape.latent if _holds_latents(shape, of_rank.keys, config) else 0,
        )
        for shape, source, of_rank in zip(shapes, stored, shares, strict=True)
    ]
    if any(shape.divided and shape.latent for shape in here):
        raise UnsupportedModelError(
            "divide_pages: expected a model whose pages hold keys and values, got one whose pages "
            "hold latents, of which each rank has all"
        )
    return _grouped(here, config.head_groups) if ranks > 1 else here  # else nothing is sent


def _grouped(shapes: list[LayerShape], groups: int) -> list[LayerShape]:
    """Those of each layer's groups of heads in place of the layer's."""
    if groups == 1:
        return shapes
    if any(shape.latent for shape in shapes):
        raise UnsupportedModelError(
            "head_groups: expected 1 for a model whose pages hold latents, which all heads are "
            f"made of, got {groups}"
        )
    if any(shape.copies > 1 for shape in shapes):
        raise UnsupportedModelError(
            "head_groups: expected 1 where ranks hold copies of key/value heads, whose number they "
            f"do not divide, got {groups}"
        )
    if any(shape.kv_heads % groups for shape in shapes):
        heads = " and ".join(str(n) for n in sorted({s.kv_heads for s in shapes}))
        raise UnsupportedModelError(
            f"head_groups: expected a divisor of the {heads} key/value heads that a rank holds, "
            f"got {groups}"
        )
    return [
        replace(
            shape,
            query_heads=shape.query_heads // groups,
            kv_heads=shape.kv_heads // groups,
            groups=groups,
            source=None if shape.source is None else shape.source * groups + group,
        )
        for shape in shapes
        for group in range(groups)
    ]


def _holds_latents(shape: LayerShape, kv_heads: int, config: Config) -> bool:
    return rule_of(config) is None and shape.latent < kv_heads * 2 * shape.head_dim


def tokens_here(tokens: int, ranks: int, *, recurrent: bool) -> int:
    """Tokens of a chunk with which a rank's activations are counted.

    Args:
        recurrent: some layers hand on states: ranks run these on all of a chunk, and all layers are
            counted so.
    """
    return tokens if recurrent else -(-tokens // ranks)


def shard_model(model: Any, mesh: Any) -> None:
    """Shard a causal model over the ranks of a sequence: each decoder layer, then the rest.

    A head that classifies sequences stays whole: it runs in the caller's graph, outside calls.

    Raises:
        UnsupportedModelError: it is none, or its layers are not found.
    """
    causal = CausalModel(model)
    shard(model, causal.layers, mesh, () if causal.head.gives_logits else causal.head.own_weights())


def gathering(placement: Placement, weights: Weights, work: Callable[[], T]) -> T:
    """Do what may gather weights outside a call; an error of one rank is raised by all.

    Ranks that wait for weights do not hear what one that failed tells at the end.
    """
    if not weights.is_sharded:
        return placement.together(work)
    with placement.call():
        found = work()
        placement.settle(lambda: None)
        return found


def spans_here(chunks: Chunks, placement: Placement) -> list[tuple[int, int]]:
    """Tokens [begin, end) of each chunk that this rank runs for itself."""
    return [placement.slices(*span).own for span in chunks.spans]
