"""An embedding whose gradient is added to its sum row by row.

Autograd's own would be written for the whole vocabulary and added to the sum in every chunk: 7 GB
of traffic for 152,064 rows of 3,584, of which a chunk of 4,096 tokens touches 4,096 at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomb.model.linear import WeightSums


class _SummedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: nn.Parameter, padding: int | None, sums: WeightSums
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.sums = weight, padding, sums
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        rows, values = ids.flatten(), grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.padding is not None:  # its row gets no gradient
            values = values.masked_fill((rows == ctx.padding)[:, None], 0)
        ctx.sums.add_rows(ctx.weight, rows, values)
        return None, None, None, None


def summed_embedding(
    causal: nn.Module, sums: WeightSums
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A forward for the input embedding, if it trains and its sum can be taken so; else nothing."""
    module: Any = causal.get_input_embeddings()  # type: ignore[operator]
    if type(module) is not nn.Embedding or "forward" in module.__dict__:
        return {}
    weight = module.weight
    plain = not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
    watched = bool(weight._backward_hooks)  # somebody looks at this gradient or changes it
    if not plain or not weight.requires_grad or watched or type(weight) is not nn.Parameter:
        return {}
    stock = module.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return stock(ids)
        apply: Callable[..., torch.Tensor] = _SummedEmbedding.apply
        return apply(ids, weight, module.padding_idx, sums)

    return {module: forward}


def sum_by_row(rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of equal rows added up, in a fixed order; does not ask the device for their number.

    Args:
        rows: [n] int64.
        values: [n, width].

    Returns:
        Row numbers [n] and sums [n, width]. Of equal rows one has the sum; behind the distinct ones
        row 0 follows with zeros.
    """
    ordered, order = rows.sort(stable=True)
    starts = torch.ones_like(ordered)
    starts[1:] = ordered[1:] != ordered[:-1]
    place = starts.cumsum(0) - 1  # among the distinct rows
    distinct = torch.zeros_like(ordered).scatter_(0, place, ordered)
    place_of_value = torch.empty_like(place).scatter_(0, order, place)
    sums = torch.ops.aten.embedding_dense_backward(values, place_of_value, rows.numel(), -1, False)
    return distinct, sums
