"""Tensors that are added up over ranks, as flat buckets which the ranks divide evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch

from oomb.neighbours import neighbours_within

WORD_BYTES = 16  # what a thread of a GPU moves at once
_BUCKET_BYTES = 64 * 2**20  # so that GPUs need little room for each other's buckets


def add_up_in_buckets(
    tensors: list[torch.Tensor], ranks: int, add_up: Callable[[torch.Tensor], object]
) -> None:
    """Replace each tensor by its sum over ranks.

    Args:
        add_up: does so with a flat tensor, [ranks * n], which begins on a word, and of which n
            values are whole words; of :func:`bucket_bytes` at most. Where a tensor, or a part of
            one, is that by itself, it is given as it lies in memory.
    """
    for bucket in _buckets(tensors, bucket_bytes(ranks)):
        flat = bucket[0] if len(bucket) == 1 else torch.cat(bucket)
        even = ranks * max(1, WORD_BYTES // flat.element_size())
        count = flat.numel()
        whole = flat
        if count % even or flat.data_ptr() % WORD_BYTES:
            whole = flat.new_zeros(-(-count // even) * even)
            whole[:count] = flat
        add_up(whole)
        if whole is bucket[0]:
            continue
        for part, room in zip(
            whole[:count].split([x.numel() for x in bucket]), bucket, strict=True
        ):
            room.copy_(part)


def bucket_bytes(ranks: int) -> int:
    """A bucket's size, of which ranks have a whole number of words each."""
    return _BUCKET_BYTES // (ranks * WORD_BYTES) * (ranks * WORD_BYTES)


def _buckets(tensors: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Flat views of neighbours of one dtype, together at most a bucket; large ones in parts."""
    for _, same in groupby(tensors, key=lambda x: x.dtype):
        parts = (part for x in same for part in x.view(-1).split(size // x.element_size()))
        yield from neighbours_within(size, parts, lambda part: part.nbytes)
