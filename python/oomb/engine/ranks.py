"""What ranks of one sequence ask of a model and of the settings."""

from __future__ import annotations

import math
from collections.abc import Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from oomb.config import Config, PageRule, TopKPages
from oomb.core.layout import Chunks
from oomb.errors import UnsupportedModelError
from oomb.model.causal import LayerShape
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights


def shapes_here(shapes: list[LayerShape], ranks: int) -> list[LayerShape]:
    """Attention of each layer with the heads that one of ``ranks`` holds.

    Raises:
        UnsupportedModelError: they cannot have equal shares.
    """
    uneven = [shape.kv_heads for shape in shapes if shape.kv_heads % ranks]
    if uneven:
        heads = math.gcd(*(shape.kv_heads for shape in shapes))
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise UnsupportedModelError(
            f"mesh: expected ranks that divide the {heads} key/value heads of the model, got "
            f"{ranks} ranks: share a sequence among {', '.join(fitting)}. More ranks than "
            "key/value heads are not supported yet"
        )
    return [
        replace(s, query_heads=s.query_heads // ranks, kv_heads=s.kv_heads // ranks) for s in shapes
    ]


def expect_fits_ranks(config: Config, mixers: Sized, ranks: int) -> None:
    """Refuse settings and models that several ranks cannot run.

    Raises:
        ValueError: a page rule of the user's own.
        UnsupportedModelError: recurrent layers.
    """
    expect_rule_of_ranks(config, ranks)
    expect_no_mixers(mixers, ranks)


def expect_rule_of_ranks(config: Config, ranks: int) -> None:
    """Refuse a page rule that would have to see heads of other ranks.

    Raises:
        ValueError: it is one of the user's own.
    """
    rule = config.attention
    if ranks > 1 and isinstance(rule, PageRule) and type(rule) is not TopKPages:
        raise ValueError(
            f"attention: expected oomb.Dense() or oomb.TopKPages(…) where ranks share a sequence, "
            f"got {type(rule).__name__}, which would see the heads of one rank alone"
        )


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
