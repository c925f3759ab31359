"""What ranks of one sequence ask of a model and of the settings."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from oomb.core.layout import Chunks
from oomb.errors import UnsupportedModelError
from oomb.model.causal import LayerShape
from oomb.parallel.heads import HeadShares
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights


def shapes_here(shapes: list[LayerShape], ranks: int) -> list[LayerShape]:
    """Attention of each layer with the heads that one of ``ranks`` holds.

    Raises:
        UnsupportedModelError: some rank would have no queries of its own.
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
    return [
        replace(shape, query_heads=of_rank.queries, kv_heads=of_rank.keys, copies=of_rank.copies)
        for shape, of_rank in zip(shapes, shares, strict=True)
    ]


def expect_no_mixers(mixers: Sized, ranks: int) -> None:
    """Refuse layers that hand a state from token to token: ranks run tokens side by side.

    Raises:
        UnsupportedModelError: there are some, and several ranks.
    """
    if ranks > 1 and len(mixers) > 0:
        raise UnsupportedModelError(
            f"mesh: expected a model of attention layers alone, got {len(mixers)} recurrent "
            "layers, whose states ranks do not hand on yet: train it on one GPU"
        )


def around_gathers(placement: Placement, weights: Weights) -> AbstractContextManager[None]:
    """Around what gathers weights outside a call: an error of one rank ends it on all."""
    return placement.call() if weights.is_sharded else nullcontext()


def spans_here(chunks: Chunks, placement: Placement) -> list[tuple[int, int]]:
    """Tokens [begin, end) of each chunk that this rank runs for itself."""
    return [placement.slices(*span).own for span in chunks.spans]
