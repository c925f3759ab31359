"""Tokens of all heads ⇄ heads of all tokens: the all-to-all around attention, as autograd sees it.

              rank 0                          rank 1
    before    [ tokens 0-3 ][ heads a, b ]    [ tokens 4-7 ][ heads a, b ]
    after     [ tokens 0-7 ][ head a ]        [ tokens 0-7 ][ head b ]

Queries, keys and values of one rank for another are one message, tokens first:
[tokens, batch, heads of q, k and v, head_dim]. Keys and values go to all ranks that hold a copy of
their head; what these give back is summed. Where ranks write into each other's memory and hold no
copies, heads go from their tensors into messages, and from messages into tensors, on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from oomb.parallel.group import Ranks
from oomb.parallel.heads import HeadShares, in_pieces, picked, received_heads, sent_heads
from oomb.parallel.in_order import added_in_order
from oomb.parallel.slices import TokenSlices

Tensors = tuple[torch.Tensor, ...]
T = TypeVar("T")


class ToHeads(torch.autograd.Function):
    """[B, heads, own tokens, D] → [B, heads of a rank, all tokens of the chunk, D].

    The first tensor has query heads, the others key/value heads.
    """

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, slices: TokenSlices, shares: HeadShares, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.ranks, ctx.slices, ctx.shares = ranks, slices, shares
        return _to_heads(ranks, slices, shares, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_to_tokens(ctx.ranks, ctx.slices, ctx.shares, grads, aside=True)


class ToTokens(torch.autograd.Function):
    """The way back of :class:`ToHeads`."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, slices: TokenSlices, shares: HeadShares, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.ranks, ctx.slices, ctx.shares = ranks, slices, shares
        return _to_tokens(ranks, slices, shares, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_to_heads(ctx.ranks, ctx.slices, ctx.shares, grads, aside=True)


class KnownOutput(torch.autograd.Function):
    """Attention's output [B, heads, own tokens, D] where it is known: nothing is sent for it.

    Its backward needs heads of all tokens, of everything that attention's needs, and sends them
    together; what comes back it sends as that of :class:`ToHeads` does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        slices: TokenSlices,
        shares: HeadShares,
        backward: Callable[..., Tensors],
        *tensors: torch.Tensor,
    ) -> Tensors:
        ctx.ranks, ctx.slices, ctx.shares, ctx.attention = ranks, slices, shares, backward
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # q, k, v, o, lse
        o, lse = (x.detach() for x in tensors[3:])
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor | None, _: Any) -> Any:
        ranks, slices, shares = ctx.ranks, ctx.slices, ctx.shares
        q, k, v, o, lse = ctx.saved_tensors
        d_o = torch.zeros_like(o) if d_o is None else d_o
        of_queries = replace(shares, kv_heads=shares.query_heads)
        found = _sets_to_heads(ranks, slices, ((shares, (q, k, v)), (of_queries, (o, d_o))))
        grads = ctx.attention(*found[:4], lse, found[4])
        d_qkv = _to_tokens(ranks, slices, shares, grads, aside=True)
        return None, None, None, None, *d_qkv, None, None


class ToWhole(torch.autograd.Function):
    """[B, own tokens, …] → [B, all tokens of the chunk, …]; the gradient is summed over ranks.

    rank 0   [ x0    ]   all-gather   [ x0 x1 ]        [ g0 g1 ]   all-to-all   [ g0 + h0 ]
    rank 1   [    x1 ]                [ x0 x1 ]        [ h0 h1 ]                [ g1 + h1 ]
    """

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, slices: TokenSlices, x: torch.Tensor) -> torch.Tensor:
        ctx.ranks, ctx.slices = ranks, slices
        sizes = slices.sizes
        own = x.transpose(0, 1)[: sizes[slices.rank]]  # without a token that is nobody's
        width = own[:1].numel() if own.shape[0] else x[:, :1].numel()
        sent = own.contiguous().view(-1).repeat(ranks.size)
        received = ranks.all_to_all(
            sent,
            [own.numel()] * ranks.size,
            [size * width for size in sizes],
            max(sizes) * width,
        )
        return received.view(sum(sizes), *own.shape[1:]).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ranks, slices = ctx.ranks, ctx.slices
        sizes = slices.sizes
        own, rows = sizes[slices.rank], grad.transpose(0, 1).contiguous()
        width = rows[:1].numel()
        received = ranks.all_to_all(
            rows.view(-1),
            [size * width for size in sizes],
            [own * width] * ranks.size,
            max(sizes) * width,
        )
        parts = received.view(ranks.size, own, *rows.shape[1:])
        first, last = slices.run
        result = grad.new_zeros(last - first, *rows.shape[1:])
        result[:own] = added_in_order(parts)
        return None, None, result.transpose(0, 1)


def _to_heads(
    ranks: Ranks, slices: TokenSlices, shares: HeadShares, tensors: Tensors, *, aside: bool = False
) -> Tensors:
    """
    Args:
        aside: the ranks have other work to do meanwhile.
    """
    if aside:
        return _sets_to_heads(ranks, slices, ((shares, tensors),))
    copied = _copied(ranks, lambda: _copied_to_heads(ranks, slices, shares, tensors))
    return copied or _sent_to_heads(ranks, slices, shares, tensors)


def _sets_to_heads(
    ranks: Ranks, slices: TokenSlices, sets: Sequence[tuple[HeadShares, Tensors]]
) -> Tensors:
    """Several messages, one behind the other, while other work is done; what comes of all."""

    def copy() -> list[Tensors] | None:
        copied: list[Tensors] = []
        for shares, tensors in sets:
            received = _copied_to_heads(ranks, slices, shares, tensors)
            if received is None:  # those that follow would come before it
                break
            copied.append(received)
        return copied or None

    found = _copied(ranks, copy, aside=True) or []
    if not found:
        _without_copies(ranks)
    for shares, tensors in sets[len(found) :]:
        found.append(_sent_to_heads(ranks, slices, shares, tensors))
    return tuple(x for received in found for x in received)


def _sent_to_heads(
    ranks: Ranks, slices: TokenSlices, shares: HeadShares, tensors: Tensors
) -> Tensors:
    sizes = slices.sizes
    own, width = sizes[slices.rank], _heads(shares, tensors)[1]
    received = ranks.all_to_all(
        _messages(shares, own, tensors),
        [own * width] * ranks.size,
        [size * width for size in sizes],
        max(sizes) * width,
    )
    return _of_heads(slices, shares, tensors, received)


def _copied_to_heads(
    ranks: Ranks, slices: TokenSlices, shares: HeadShares, tensors: Tensors
) -> Tensors | None:
    """By copies between GPUs; None: nothing was done."""
    if ranks.peers is None or shares.copies > 1:
        return None
    sizes, width = slices.sizes, _heads(shares, tensors)[1]
    received = tensors[0].new_empty(sum(sizes) * width)
    if not ranks.peers.to_heads(tensors, sizes, max(sizes) * width, received):
        return None
    ranks.expect_no_failure()
    return _of_heads(slices, shares, tensors, received)


def _heads(shares: HeadShares, tensors: Tensors) -> tuple[list[int], int]:
    """Of each tensor the heads of a rank, and elements of a token in a message."""
    heads = [shares.queries, *[shares.keys] * (len(tensors) - 1)]
    batch, _, _, head_dim = tensors[0].shape
    return heads, batch * sum(heads) * head_dim


def _of_heads(
    slices: TokenSlices, shares: HeadShares, tensors: Tensors, received: torch.Tensor
) -> Tensors:
    """Messages of all ranks as tensors of a rank's heads, of all tokens."""
    heads, (batch, _, _, head_dim) = _heads(shares, tensors)[0], tensors[0].shape
    whole = received.view(sum(slices.sizes), batch, sum(heads), head_dim)
    return tuple(part.permute(1, 2, 0, 3) for part in whole.split(heads, dim=2))


def _to_tokens(
    ranks: Ranks, slices: TokenSlices, shares: HeadShares, tensors: Tensors, *, aside: bool = False
) -> Tensors:
    """
    Args:
        aside: as of :func:`_to_heads`.
    """
    sizes = slices.sizes
    own = sizes[slices.rank]
    batch, _, _, head_dim = tensors[0].shape
    heads = [x.shape[1] for x in tensors]
    width = batch * sum(heads) * head_dim
    largest = max(sizes) * width
    first, last = slices.run
    # Zeros where the rank runs a token that is nobody's.
    like = tensors[0].new_empty if own else tensors[0].new_zeros
    numbers = [shares.query_heads, *[shares.kv_heads] * (len(tensors) - 1)]
    results = [like(batch, last - first, n, head_dim).transpose(1, 2) for n in numbers]

    def copy() -> Tensors | None:
        peers = ranks.peers if shares.copies == 1 else None
        if peers is None or not peers.to_tokens(tensors, sizes, largest, results):
            return None
        ranks.expect_no_failure()
        return tuple(results)

    copied = _copied(ranks, copy, aside=aside)
    if copied is not None:
        return copied
    if aside:
        _without_copies(ranks)
    rows = in_pieces([x.to(tensors[0].dtype).permute(2, 0, 1, 3) for x in tensors])
    received = ranks.all_to_all(
        torch.cat(rows, dim=2).view(-1).view(tensors[0].dtype),
        [size * width for size in sizes],
        [own * width] * ranks.size,
        largest,
    )
    mine = received.view(ranks.size, own, batch, sum(heads), head_dim)
    for result, x in zip(results, _whole_heads(shares, len(tensors) - 1, mine), strict=True):
        result.transpose(1, 2)[:, :own] = x
    return tuple(results)


def _copied(ranks: Ranks, copy: Callable[[], T | None], *, aside: bool = False) -> T | None:
    """What comes by copies between GPUs; None: nothing was done."""
    if ranks.peers is None:
        return None
    if not aside or ranks.meanwhile is None:
        with ranks.measured():
            return copy()
    found: T | None = ranks.peers.aside(copy, ranks.meanwhile, ranks.measured)
    return found


def _without_copies(ranks: Ranks) -> None:
    """What waits for an exchange is done before one that nothing runs beside."""
    if ranks.meanwhile is not None:
        ranks.meanwhile()


def _messages(shares: HeadShares, own: int, tensors: Tensors) -> torch.Tensor:
    """[ranks, own tokens, batch, heads of a rank, D], flat."""
    batch, dtype = tensors[0].shape[0], tensors[0].dtype
    rows = [x[:, :, :own].to(dtype).permute(2, 0, 1, 3) for x in tensors]
    if shares.fills:
        rows.append(rows[0].new_zeros(own, batch, 1, rows[0].shape[3]))
    every = torch.cat(in_pieces(rows), dim=2)
    heads = picked(every, sent_heads(shares, len(tensors) - 1)).unflatten(2, (shares.ranks, -1))
    messages: torch.Tensor = heads.permute(2, 0, 1, 3, 4).contiguous().view(-1).view(dtype)
    return messages


def _whole_heads(shares: HeadShares, others: int, messages: torch.Tensor) -> list[torch.Tensor]:
    """[ranks, own tokens, batch, heads of a rank, D] → each tensor's [batch, own tokens, heads, D].

    What copies of a key/value head give back is summed, in their order.
    """
    dtype = messages.dtype
    rows = in_pieces([messages])[0].permute(2, 1, 0, 3, 4).flatten(2, 3)
    queries, keys = received_heads(shares, others)
    whole = [picked(rows, queries).view(dtype)]
    for copies in keys:
        parts = [picked(rows, places).view(dtype) for places in copies]
        whole.append(parts[0] if len(parts) == 1 else added_in_order(parts))
    return whole
