"""Tensors that are added up over ranks, as flat buckets which the ranks divide evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch

from oomb.neighbours import neighbours_within

BUCKET_BYTES = 64 * 2**20  # so that GPUs need little room for each other's buckets
_WORD_BYTES = 16  # of which each rank's part consists


def add_up_in_buckets(
    tensors: list[torch.Tensor], ranks: int, add_up: Callable[[torch.Tensor], object]
) -> None:
    """Replace each tensor by its sum over ranks.

    Args:
        add_up: does so with a flat tensor, [ranks * n]. A tensor, or a part of one, that is a
            bucket of its own is given as it lies in memory.
    """
    for bucket in _buckets(tensors):
        flat = bucket[0] if len(bucket) == 1 else torch.cat(bucket)
        even = ranks * max(1, _WORD_BYTES // flat.element_size())
        count = flat.numel()
        whole = flat
        if count % even:
            whole = flat.new_zeros(-(-count // even) * even)
            whole[:count] = flat
        add_up(whole)
        if whole is bucket[0]:
            continue
        for part, room in zip(
            whole[:count].split([x.numel() for x in bucket]), bucket, strict=True
        ):
            room.copy_(part)


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat views of neighbours of one dtype, together at most a bucket; large ones in parts."""
    for _, same in groupby(tensors, key=lambda x: x.dtype):
        parts = (part for x in same for part in x.view(-1).split(BUCKET_BYTES // x.element_size()))
        yield from neighbours_within(BUCKET_BYTES, parts, lambda part: part.nbytes)
