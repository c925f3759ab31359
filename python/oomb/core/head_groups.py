"""A layer's heads in groups, of which each rank holds a share: one is exchanged after another.

Of 2 ranks, 8 heads and 2 groups:

    group 0   heads 0 1 on rank 0, 2 3 on rank 1
    group 1   heads 4 5 on rank 0, 6 7 on rank 1

What a group receives is gone when the next one's is made, so all of them take the memory of one.
To pages and kernels a group is a layer of its own, with fewer heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from oomb.model.interface import AttentionCall


def calls_of_groups(call: AttentionCall, groups: int) -> list[AttentionCall]:
    """One call for each group, of its heads."""
    q, k, v = (x.chunk(groups, dim=1) for x in (call.q, call.k, call.v))
    sinks = [None] * groups if call.sinks is None else call.sinks.chunk(groups)
    parts = zip(q, k, v, sinks, strict=True)
    return [replace(call, q=q, k=k, v=v, sinks=sinks) for q, k, v, sinks in parts]


class GroupOutputs:
    """Attention's output [B, heads, C, D] of a layer, tokens first in memory, group by group.

    Args:
        heads: of the layer's queries.
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._whole: torch.Tensor | None = None

    def put(self, group: int, o: torch.Tensor) -> None:
        """Take a group's output [B, heads of a group, C, D]."""
        if self._whole is None:
            batch, _, tokens, head_dim = o.shape
            self._whole = o.new_empty(batch, tokens, self._heads, head_dim).transpose(1, 2)
        self._whole = _Put.apply(self._whole, o, group * o.shape[1])  # type: ignore[no-untyped-call]

    @property
    def whole(self) -> torch.Tensor:
        assert self._whole is not None
        return self._whole


class _Put(torch.autograd.Function):
    """Writes heads where nothing was, in place: nothing else is allocated, backward neither."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, o: torch.Tensor, first: int) -> torch.Tensor:
        ctx.place = first, o.shape[1]
        ctx.mark_dirty(whole)
        whole.narrow(1, *ctx.place).copy_(o)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad.narrow(1, *ctx.place), None
