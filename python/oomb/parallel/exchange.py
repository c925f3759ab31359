"""Tokens of all heads ⇄ heads of all tokens: the all-to-all around attention, as autograd sees it.

              rank 0                          rank 1
    before    [ tokens 0-3 ][ heads a, b ]    [ tokens 4-7 ][ heads a, b ]
    after     [ tokens 0-7 ][ head a ]        [ tokens 0-7 ][ head b ]

Queries, keys and values of one rank for another are one message, tokens first:
[tokens, batch, heads of q, k and v, head_dim].
"""

from __future__ import annotations

from typing import Any

import torch

from oomb.parallel.group import Ranks
from oomb.parallel.slices import TokenSlices


class ToHeads(torch.autograd.Function):
    """[B, H, own tokens, D] of each tensor → [B, H / ranks, all tokens of the chunk, D]."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, slices: TokenSlices, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.slices = ranks, slices
        return _to_heads(ranks, slices, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *_to_tokens(ctx.ranks, ctx.slices, grads)


class ToTokens(torch.autograd.Function):
    """The way back of :class:`ToHeads`."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, slices: TokenSlices, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.slices = ranks, slices
        return _to_tokens(ranks, slices, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *_to_heads(ctx.ranks, ctx.slices, grads)


def _to_heads(
    ranks: Ranks, slices: TokenSlices, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    sizes = slices.sizes
    own, total = sizes[slices.rank], sum(sizes)
    batch, _, _, head_dim = tensors[0].shape
    heads = [x.shape[1] // ranks.size for x in tensors]
    width = batch * sum(heads) * head_dim  # elements of a token in a message
    send = tensors[0].new_empty(ranks.size, own, batch, sum(heads), head_dim)
    for part, x in zip(send.split(heads, dim=3), tensors, strict=True):
        x = x[:, :, :own].unflatten(1, (ranks.size, -1))  # [B, ranks, heads, own, D]
        part.copy_(x.permute(1, 3, 0, 2, 4))
    received = ranks.all_to_all(
        send.view(-1), [own * width] * ranks.size, [size * width for size in sizes]
    )
    whole = received.view(total, batch, sum(heads), head_dim)
    return tuple(part.permute(1, 2, 0, 3) for part in whole.split(heads, dim=2))


def _to_tokens(
    ranks: Ranks, slices: TokenSlices, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    sizes = slices.sizes
    own, total = sizes[slices.rank], sum(sizes)
    batch, _, _, head_dim = tensors[0].shape
    heads = [x.shape[1] for x in tensors]
    width = batch * sum(heads) * head_dim
    send = tensors[0].new_empty(total, batch, sum(heads), head_dim)
    for part, x in zip(send.split(heads, dim=2), tensors, strict=True):
        part.copy_(x.permute(2, 0, 1, 3))
    received = ranks.all_to_all(
        send.view(-1), [size * width for size in sizes], [own * width] * ranks.size
    )
    mine = received.view(ranks.size, own, batch, sum(heads), head_dim)
    first, last = slices.run
    results = []
    for part, number in zip(mine.split(heads, dim=3), heads, strict=True):
        # Zeros where the rank runs a token that is nobody's.
        like = part.new_empty if own else part.new_zeros
        result = like(batch, last - first, ranks.size, number, head_dim)
        result[:, :own] = part.permute(2, 1, 0, 3, 4)
        results.append(result.flatten(2, 3).transpose(1, 2))
    return tuple(results)
