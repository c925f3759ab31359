"""Sums of many tensors over ranks, added in the order of ranks whatever the transport does."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from oomb.parallel.buckets import add_up_in_buckets
from oomb.parallel.group import Ranks
from oomb.parallel.in_order import added_in_order


def sum_in_rank_order(ranks: Ranks, tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over ranks; the same bits on each rank and in each run.

        rank 0   [ a0 | b0 ]  all-to-all   [ a0 a1 ] → a0 + a1   all-gather   [ a | b ]
        rank 1   [ a1 | b1 ]               [ b0 b1 ] → b0 + b1                [ a | b ]

    As many bytes travel as in a ring's all-reduce, in buckets. Large tensors are sent from where
    they are, and come there.
    """
    add_up_in_buckets(tensors, ranks.size, partial(_add_up, ranks))


def _add_up(ranks: Ranks, flat: torch.Tensor) -> None:
    if ranks.add_up(flat):
        return
    share = flat.numel() // ranks.size
    sizes = [share] * ranks.size
    parts = ranks.all_to_all(flat, sizes, sizes, share).view(ranks.size, share)
    own = added_in_order(parts).to(flat.dtype)
    ranks.all_gather(own, into=flat.view(ranks.size, share))


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """What torch wants of ``param.grad``: the parameter's own dtype, or the one it was told."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
