"""Page lists that do not depend on random weights, which may choose kindly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from oomb.config import Past, TopKPages

FIRST, LATEST = 4, 8


@dataclass(frozen=True, kw_only=True)
class SyntheticPages(TopKPages):
    """4 first pages, 8 latest, half carried over from the previous block, the rest random.

    The lists are drawn once, before a step is timed; in the step the real choice is computed too,
    so that its cost counts, and then replaced.

    Attributes:
        layers: of the model.
        blocks: of queries in a whole chunk.
    """

    layers: int
    blocks: int
    carried_share: ClassVar[float] = 0.5
    forced: ClassVar[bool] = True

    def prepare(self, past_pages: int, heads: int, device: torch.device) -> None:
        """Draw the lists of chunks that have at most ``past_pages`` behind them."""
        for pages in range(0, past_pages + 1, self.blocks):
            self.drawn(pages, heads, device)

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: Past) -> torch.Tensor:
        """Drawn lists, at the real choice's cost."""
        real = super().choose(q, summaries, past)
        lists = self.drawn(past.num_pages, real.shape[2], q.device)
        return lists[past.layer, :, : real.shape[1]].expand_as(real).contiguous()

    def drawn(self, past_pages: int, heads: int, device: torch.device) -> torch.Tensor:
        """Lists over the past's pages: int32 [layers, 1, blocks, heads, budget]."""
        carried = int(self.carried_share * self.budget)
        shape = (self.layers, self.blocks, heads)
        return _drawn(self.budget, carried, self.forced, past_pages, shape, str(device))


@dataclass(frozen=True, kw_only=True)
class UniformPages(SyntheticPages):
    """Every page equally likely: the worst case for residency."""

    carried_share: ClassVar[float] = 0.0
    forced: ClassVar[bool] = False


@lru_cache(maxsize=4096)  # a call of 4M tokens has 1,024 chunks
def _drawn(
    budget: int,
    carried: int,
    forced: bool,
    pages: int,
    shape: tuple[int, int, int],
    device: str,
) -> torch.Tensor:
    """Lists over ``pages`` past pages: int32 [layers, 1, query_blocks, heads, budget].

    Args:
        carried: pages that a block takes over from the one before.
        forced: the first and the latest pages are always there.
        shape: layers, query blocks of a chunk, heads.
    """
    layers, blocks, heads = shape
    if pages <= budget:
        return torch.empty(layers, 1, blocks, heads, 0, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(pages)
    rank = torch.rand((layers, blocks, heads, pages), generator=generator, device=device)
    if forced:
        rank[..., :FIRST] = 3.0
        rank[..., -LATEST:] = 3.0
    lists: list[torch.Tensor] = []
    for block in range(blocks):
        if block and carried:
            order = torch.rand(lists[-1].shape, generator=generator, device=device)
            kept = lists[-1].gather(-1, order.topk(carried)[1])
            rank[:, block].scatter_(-1, kept, 2.0)
        lists.append(rank[:, block].topk(budget, dim=-1)[1])
    return torch.stack(lists, dim=1).sort(dim=-1)[0].to(torch.int32)[:, None]
