"""Sums of many tensors over ranks, added in the order of ranks whatever the transport does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import nn

from oomb.neighbours import neighbours_within
from oomb.parallel.group import Ranks
from oomb.parallel.in_order import added_in_order

_BUCKET_BYTES = 64 * 2**20  # so that GPUs need little room for each other's buckets


def sum_in_rank_order(ranks: Ranks, tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over ranks; the same bits on each rank and in each run.

        rank 0   [ a0 | b0 ]  all-to-all   [ a0 a1 ] → a0 + a1   all-gather   [ a | b ]
        rank 1   [ a1 | b1 ]               [ b0 b1 ] → b0 + b1                [ a | b ]

    As many bytes travel as in a ring's all-reduce, in buckets. Parts of a tensor that ranks divide
    evenly are sent from where they are, and come there.
    """
    for bucket in _buckets(tensors):
        if len(bucket) == 1:
            _sum_(ranks, bucket[0])
            continue
        flat = torch.cat(bucket)
        _sum_(ranks, flat)
        for part, room in zip(flat.split([x.numel() for x in bucket]), bucket, strict=True):
            room.copy_(part)


def _sum_(ranks: Ranks, flat: torch.Tensor) -> None:
    share = -(-flat.numel() // ranks.size)
    even = flat.numel() == share * ranks.size
    send = flat if even else flat.new_zeros(share * ranks.size)
    if not even:
        send[: flat.numel()] = flat
    sizes = [share] * ranks.size
    parts = ranks.all_to_all(send, sizes, sizes, share).view(ranks.size, share)
    own = added_in_order(parts).to(flat.dtype)
    ranks.all_gather(own, into=send.view(ranks.size, share))
    if not even:
        flat.copy_(send[: flat.numel()])


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat views of neighbours of one dtype, together at most a bucket; large ones in parts."""
    for _, same in groupby(tensors, key=lambda x: x.dtype):
        parts = (part for x in same for part in x.view(-1).split(_BUCKET_BYTES // x.element_size()))
        yield from neighbours_within(_BUCKET_BYTES, parts, lambda part: part.nbytes)


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """What torch wants of ``param.grad``: the parameter's own dtype, or the one it was told."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
