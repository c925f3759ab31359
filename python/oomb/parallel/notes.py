"""Notes of ranks to all others, any small objects, through collectives of tensors.

[ size ][ first bytes …          ]   all-gather, and where one's note is longer   [ rest ]
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

_FIRST_BYTES = 4096  # size and first bytes
_SIZE_BYTES = 8


def gathered(note: object, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The note of each rank.

    Args:
        all_gather: a tensor of each rank, [ranks, …], of equal shapes.
    """
    text = pickle.dumps(note)
    inside = _FIRST_BYTES - _SIZE_BYTES
    head = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    head[:_SIZE_BYTES] = _bytes(len(text).to_bytes(_SIZE_BYTES, "little"))
    first, own = text[:inside], text[inside:]
    head[_SIZE_BYTES : _SIZE_BYTES + len(first)] = _bytes(first)
    heads = all_gather(head)
    sizes = [int.from_bytes(bytes(row[:_SIZE_BYTES].tolist()), "little") for row in heads]
    longest = max(sizes) - inside
    rests = [b""] * len(sizes)
    if longest > 0:
        rest = torch.zeros(longest, dtype=torch.uint8)
        if own:
            rest[: len(own)] = _bytes(own)
        rests = [row.numpy().tobytes() for row in all_gather(rest)]
    return [
        pickle.loads((row[_SIZE_BYTES:].numpy().tobytes() + rest)[:size])
        for row, rest, size in zip(heads, rests, sizes, strict=True)
    ]


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
