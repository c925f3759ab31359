"""Sums of many tensors over ranks, added in the order of ranks whatever the transport does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from oomb.parallel.group import Ranks
from oomb.parallel.in_order import added_in_order

_BUCKET_BYTES = 64 * 2**20  # so that GPUs need little room for each other's buckets


def sum_in_rank_order(ranks: Ranks, tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over ranks; the same bits on each rank and in each run.

        rank 0   [ a0 | b0 ]  all-to-all   [ a0 a1 ] → a0 + a1   all-gather   [ a | b ]
        rank 1   [ a1 | b1 ]               [ b0 b1 ] → b0 + b1                [ a | b ]

    As many bytes travel as in a ring's all-reduce, in buckets.
    """
    for bucket in _buckets(tensors):
        flat = bucket[0] if len(bucket) == 1 else torch.cat(bucket)
        total = _sum(ranks, flat)
        for part, room in zip(total.split([x.numel() for x in bucket]), bucket, strict=True):
            room.copy_(part)


def _sum(ranks: Ranks, flat: torch.Tensor) -> torch.Tensor:
    share = -(-flat.numel() // ranks.size)
    send = flat.new_zeros(share * ranks.size)
    send[: flat.numel()] = flat
    sizes = [share] * ranks.size
    parts = ranks.all_to_all(send, sizes, sizes, share).view(ranks.size, share)
    return ranks.all_gather(added_in_order(parts).to(flat.dtype)).view(-1)[: flat.numel()]


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat views of neighbours of one dtype, together at most a bucket; large ones in parts."""
    for _, same in groupby(tensors, key=lambda x: x.dtype):
        bucket: list[torch.Tensor] = []
        filled = 0
        for x in same:
            for part in x.view(-1).split(_BUCKET_BYTES // x.element_size()):
                size = part.numel() * part.element_size()
                if bucket and filled + size > _BUCKET_BYTES:
                    yield bucket
                    bucket, filled = [], 0
                bucket.append(part)
                filled += size
        if bucket:
            yield bucket
