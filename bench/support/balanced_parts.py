"""One sequence over ranks in two blocks each, so that causal attention is as long on all of them.

sequence  │ 0 │ 1 │ 2 │ 3 │        R ranks, 2 R blocks
rank 0      0           3          sees 1 and 4 blocks
rank 1          1   2              sees 2 and 3 blocks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


class BalancedParts:
    """Of [.., tokens, ..] tensors, the two blocks of each rank.

    Args:
        group: ranks that share the sequence.
        tokens: of the whole sequence.

    Raises:
        ValueError: the tokens are not a multiple of twice the ranks.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: int) -> None:
        self._group, self._ranks = group, group.size()
        if tokens % (2 * self._ranks):
            raise ValueError(
                f"tokens: expected a multiple of {2 * self._ranks} (two blocks for each of "
                f"{self._ranks} ranks), got {tokens}"
            )
        self.block = tokens // (2 * self._ranks)
        self.begins = tuple(block * self.block for block in self._blocks(group.rank()))

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's two blocks."""
        return torch.cat([x.narrow(dim, begin, self.block) for begin in self.begins], dim)

    def gathering(self, k: torch.Tensor, v: torch.Tensor) -> Gathering:
        """Begin to send own keys and values, [1, heads, own tokens, D], to all."""
        own = torch.stack([k, v])
        parts = own.new_empty(self._ranks, *own.shape)
        work = dist.all_gather_into_tensor(
            parts.view(-1), own.view(-1), group=self._group, async_op=True
        )
        return Gathering(self, parts, work)

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """[ranks, .., own tokens, D] → [.., tokens, D]."""
        firsts, seconds = parts.split(self.block, dim=-2)
        return torch.cat([*firsts, *seconds.flip(0)], dim=-2)

    def reduced(self, *wholes: torch.Tensor) -> torch.Tensor:
        """Sums over ranks of [.., tokens, D] tensors: [tensors, .., own tokens, D] of this rank."""
        stacked = torch.stack(wholes)
        blocks = stacked.split(self.block, dim=-2)
        parts = torch.stack([
            torch.cat([blocks[block] for block in self._blocks(rank)], dim=-2)
            for rank in range(self._ranks)
        ])  # fmt: skip
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=self._group)
        return own

    def _blocks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self._ranks - 1 - rank


class Gathering:
    """Keys and values of all ranks, on their way."""

    def __init__(self, parts: BalancedParts, received: torch.Tensor, work: Any) -> None:
        self._parts, self._received, self._work = parts, received, work

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the whole sequence, each [1, heads, tokens, D]."""
        self._work.wait()
        k, v = self._parts.whole(self._received)
        return k, v
