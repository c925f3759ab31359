"""Attention of a chunk as autograd sees it: one operation, which names the call under way."""

from __future__ import annotations

from typing import Any

import torch

from oomb.core.attention import ChunkAttention, like_tokens_first
from oomb.core.chunk_run import current_run


@torch.library.custom_op("oomb::chunk_attention", mutates_args=())
def chunk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    vector: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    call: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the active call ``call`` at ``layer`` for the current chunk.

    Args:
        vector: of :meth:`ChunkAttention.vector`: gets the gradient that later chunks have left.
    """
    return ChunkAttention.active[call].forward(
        current_run(), layer, q, k, v, scale, softcap, window
    )


@chunk_attention.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return like_tokens_first(q), q.new_empty(q.shape[:3], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, vector, ctx.scale, ctx.softcap, ctx.window, ctx.call, ctx.layer = inputs
    ctx.width = 0 if vector is None else vector.shape[-1]
    ctx.run = current_run()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    attention = ChunkAttention.active[ctx.call]
    grads = attention.backward(
        ctx.run,
        ctx.layer,
        q,
        k,
        v,
        o,
        lse,
        d_o,
        None if d_lse is None else d_lse.contiguous(),
        ctx.scale,
        ctx.softcap,
        ctx.window,
        ctx.width,
    )
    return *grads, None, None, None, None, None


chunk_attention.register_autograd(_backward, setup_context=_setup)


def with_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with a sink logit per head, from that without: o · e^lse / (e^lse + e^sink)."""
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
    return o * share[..., None].to(o.dtype)
