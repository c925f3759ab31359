"""Values that backward makes again of others, which are kept anyway.

Linear layers keep their input for their weight's gradient. The output of a norm and the product of
a gate can be had again from what norm and gate keep for themselves:

    h ── norm ──▶ n ── q, k, v, or gate and up      kept: h, in place of h and n
    gate, up ── product ──▶ p ── down               kept: gate and up, in place of them and p

That is a third of what a layer keeps, for a pass over it without matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[..., torch.Tensor]
_NOTE = "oomb_origin"


@dataclass(frozen=True)
class _Origin:
    """What a value is made of.

    Attributes:
        versions: of value and sources when it was made; one with another has been changed in place.
    """

    make: Make
    sources: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]


_asked = ContextVar("whether inputs are made again", default=False)


@contextmanager
def remaking() -> Iterator[None]:
    """Inside, what can be made again is not kept."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def remakable(make: Make, *sources: torch.Tensor) -> torch.Tensor:
    """``make(*sources)``, which says inside :func:`remaking` that it is that.

    It says nothing where nobody else keeps the sources: of a value without gradient, and of sources
    that kernels keep a copy of, since they do not lie in one piece.

    Args:
        make: gives the same bits each time, and holds no tensor itself.
    """
    value = make(*sources)
    if not _asked.get() or not value.requires_grad:
        return value
    if all(source.is_contiguous() for source in sources):
        # As norm and gate keep them: weights themselves, of others no graph.
        own = tuple(source if source.is_leaf else source.detach() for source in sources)
        setattr(value, _NOTE, _Origin(make, own, _versions(value, *own)))
    return value


def keep(ctx: Any, value: torch.Tensor, *others: torch.Tensor) -> None:
    """Of an autograd function's forward: save ``value``, or what it is made of, and ``others``."""
    origin: _Origin | None = getattr(value, _NOTE, None)
    if origin is not None and origin.versions == _versions(value, *origin.sources):
        ctx.make, sources = origin.make, origin.sources
    else:
        ctx.make, sources = None, (value,)
    ctx.num_sources = len(sources)
    ctx.save_for_backward(*sources, *others)


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


def kept(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Of the same function's backward: the value and the others."""
    saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
    sources, others = saved[: ctx.num_sources], saved[ctx.num_sources :]
    value = sources[0] if ctx.make is None else ctx.make(*sources)
    return value, *others
