"""How few layers of a deep model tell what all of them take."""

from __future__ import annotations

from oomb.model.causal import CausalModel


def sample_sizes(causal: CausalModel) -> tuple[int, int] | None:
    """How many layers to run where all, or all but the first, are alike or take turns; or None."""
    kinds = [
        (type(layer), tuple((n, p.shape, p.requires_grad) for n, p in layer.named_parameters()))
        for layer in causal.layers
    ]
    layers = len(kinds)
    if len(set(kinds)) == 1:
        return (3, 4) if layers > 6 else None
    turns = range(2, layers // 3 + 1)
    found = (n for n in turns if layers % n == 0 and kinds == kinds[:n] * (layers // n))
    period = next(found, None)
    if period is not None:
        return period, 2 * period
    first = max(i for i, kind in enumerate(kinds) if kind != kinds[-1]) + 1  # of those alike
    return (first + 3, first + 4) if 2 * first + 7 < layers else None
