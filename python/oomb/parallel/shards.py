"""Sums over ranks of which each rank keeps its rows, added in the order of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oomb.parallel.group import Ranks
from oomb.parallel.in_order import added_in_order, sum_dtype

_BUCKET_BYTES = 256 * 2**20


def scattered(ranks: Ranks, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of the sums of tensors over ranks; rows as ``torch.chunk`` deals them.

        rank 0   [ a0 | b0 ]  all-to-all   [ a0 a1 ] → a0 + a1
        rank 1   [ a1 | b1 ]               [ b0 b1 ] → b0 + b1

    Args:
        tensors: [rows, …] each, of one shape on all ranks.

    Returns:
        For each [own rows, …], which may be none; sums of 16 bits in fp32.
    """
    own = [
        tensor.new_empty(
            _rows(tensor, ranks)[ranks.rank], *tensor.shape[1:], dtype=sum_dtype(tensor.dtype)
        )
        for tensor in tensors
    ]
    for bucket in _buckets(tensors):
        _scatter(
            ranks,
            [
                (tensors[i][:, a:b], own[i][:, a:b]) if b else (tensors[i], own[i])
                for i, a, b in bucket
            ],
        )
    return own


def _scatter(ranks: Ranks, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write into the second of each pair this rank's rows of the sum of the first."""
    of_rank: list[list[torch.Tensor]] = [[] for _ in range(ranks.size)]
    for whole, _ in pairs:
        for parts, part in zip(of_rank, whole.split(_rows(whole, ranks)), strict=True):
            parts.append(part.reshape(-1))
    sizes = [sum(part.numel() for part in parts) for parts in of_rank]
    send = torch.cat([part for parts in of_rank for part in parts])
    size = sizes[ranks.rank]
    received = ranks.all_to_all(send, sizes, [size] * ranks.size, max(sizes)).view(ranks.size, size)
    total = added_in_order(received)
    rooms = [room for _, room in pairs]
    for part, room in zip(total.split([room.numel() for room in rooms]), rooms, strict=True):
        room.copy_(part.view(room.shape))


def _rows(tensor: torch.Tensor, ranks: Ranks) -> list[int]:
    """Rows of each rank."""
    rows = tensor.shape[0]
    most = -(-rows // ranks.size)
    return [max(0, min(rows, (rank + 1) * most) - rank * most) for rank in range(ranks.size)]


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[tuple[int, int, int]]]:
    """Tensors of one dtype that travel together, by place; large ones in columns [begin, end).

    An end of 0 stands for a whole tensor.
    """
    bucket: list[tuple[int, int, int]] = []
    filled = 0
    for place, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        new_kind = bool(bucket) and tensors[bucket[-1][0]].dtype != tensor.dtype
        if bucket and (new_kind or filled + size > _BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        if size > _BUCKET_BYTES and tensor.ndim > 1:
            columns = max(1, tensor.shape[1] * _BUCKET_BYTES // size)
            for begin in range(0, tensor.shape[1], columns):
                yield [(place, begin, min(begin + columns, tensor.shape[1]))]
        else:
            bucket.append((place, 0, 0))
            filled += size
    if bucket:
        yield bucket
