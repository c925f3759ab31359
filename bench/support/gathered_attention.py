"""Causal attention of a rank's queries to the keys and values of all ranks, with its backward.

Torch's fast kernels mask squares alone. So a block of queries attends twice, and what it finds is
merged by the log-sum-exps; the backward of both starts from the merged output and log-sum-exp:

    keys       0 ··········· begin ····· begin + block
    queries   [     all seen      │ triangle ]          block tokens from `begin` on

Triangles need own keys only: they run while the others' are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.balanced_parts import BalancedParts
from torch.nn import functional as F

aten = torch.ops.aten


@dataclass
class Found:
    """What the forward of a rank leaves to its backward, besides queries, keys and values.

    Attributes:
        out: [1, heads, own tokens, D].
        lse: log-sum-exp of each query, in the shape that the kernel gives.
        rest: further results of the kernel, of each call.
    """

    out: torch.Tensor
    lse: torch.Tensor
    rest: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Kernel:
    """One of torch's.

    Attributes:
        forward: (q, k, v, causal, scale) → output, log-sum-exp and further results.
        backward: (gradient, q, k, v, output, log-sum-exp, further results, causal, scale)
            → gradients of q, k and v.
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[torch.Tensor, ...]]


def _cudnn_backward(grad, q, k, v, out, lse, rest, causal, scale):  # type: ignore[no-untyped-def]
    cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal,
        scale=scale,
    )  # fmt: skip


def _flash_backward(grad, q, k, v, out, lse, rest, causal, scale):  # type: ignore[no-untyped-def]
    cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )


KERNELS = {
    "cudnn": Kernel(
        lambda q, k, v, causal, scale: aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        ),
        _cudnn_backward,
    ),
    "flash": Kernel(
        lambda q, k, v, causal, scale: aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale
        ),
        _flash_backward,
    ),
    "cpu": Kernel(
        lambda q, k, v, causal, scale: aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        ),
        lambda grad, q, k, v, out, lse, _, causal, scale: (
            aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, scale=scale
            )
        ),
    ),
}


class GatheredAttention(torch.autograd.Function):
    """[1, query heads, own tokens, D] of own queries, keys and values.

    Args:
        found: what the forward has found before: nothing but the gathering runs again.
        keep: is given what the forward finds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        parts: BalancedParts,
        kernel: Kernel,
        scale: float,
        found: Found | None,
        keep: Callable[[Found], None] | None,
    ) -> torch.Tensor:
        gathering = parts.gathering(k, v)
        triangles = []
        if found is None:
            blocks = [x.split(parts.block, dim=2) for x in (q, k, v)]
            triangles = [kernel.forward(*x, True, scale) for x in zip(*blocks, strict=True)]
        whole = gathering.wait()
        if found is None:
            found = _merged(q, whole, triangles, parts, kernel, scale)
        if keep is not None:
            keep(found)
        ctx.parts, ctx.kernel, ctx.scale, ctx.rest = parts, kernel, scale, found.rest
        ctx.save_for_backward(q, *whole, found.out, found.lse)
        return found.out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        parts, block, rest = ctx.parts, ctx.parts.block, iter(ctx.rest)
        wide = torch.promote_types(k.dtype, torch.float32)
        dq = torch.empty_like(q, dtype=wide)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for place, begin in enumerate(parts.begins):
            own = slice(place * block, (place + 1) * block)
            of_queries = [x[:, :, own].contiguous() for x in (grad, q, out, lse)]
            calls = [(slice(begin, begin + block), True)]
            calls += [(slice(0, begin), False)] if begin else []
            of_block = dq[:, :, own].zero_()
            for seen, causal in calls:
                grads = ctx.kernel.backward(
                    *of_queries[:2], k[:, :, seen], v[:, :, seen], *of_queries[2:], next(rest),
                    causal, ctx.scale,
                )  # fmt: skip
                for total, part in zip((of_block, dk[:, :, seen], dv[:, :, seen]), grads,
                                       strict=True):  # fmt: skip
                    total += part
        dk, dv = parts.reduced(dk, dv).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None, None


def _merged(
    q: torch.Tensor,
    whole: tuple[torch.Tensor, torch.Tensor],
    triangles: list[tuple[Any, ...]],
    parts: BalancedParts,
    kernel: Kernel,
    scale: float,
) -> Found:
    """Each block's triangle together with what lies before it."""
    outs, sums, rest = [], [], []
    for queries, begin, triangle in zip(
        q.split(parts.block, dim=2), parts.begins, triangles, strict=True
    ):
        out, lse, *others = triangle
        rest.append(tuple(others))
        if begin:
            k, v = (x[:, :, :begin] for x in whole)
            before, lse_before, *others = kernel.forward(queries, k, v, False, scale)
            rest.append(tuple(others))
            share = torch.sigmoid(lse_before - lse)  # of the softmax that lies before
            share = share if share.dim() == out.dim() else share[..., None]
            wide = out.to(lse.dtype)
            out = wide + share * (before.to(lse.dtype) - wide)
            lse = lse - F.logsigmoid(lse - lse_before)
        outs.append(out.to(q.dtype))
        sums.append(lse)
    return Found(torch.cat(outs, dim=2), torch.cat(sums, dim=2), rest)
