"""Page lists that do not depend on random weights, which may choose kindly."""

from __future__ import annotations

import torch

from oomb.engine.selection import Selector

FIRST, LATEST = 4, 8


class SyntheticSelector(Selector):
    """4 first pages, 8 latest, half carried over from the previous block, the rest random."""

    carried_share = 0.5

    def _choose(
        self,
        q: torch.Tensor,
        summary: torch.Tensor,
        num_past: int,
        first_key: torch.Tensor | None,
        num_keys: torch.Tensor | None,
    ) -> torch.Tensor:
        page_size, budget = self._chunks.page_size, self._rule.budget
        batch, blocks, pages = q.shape[0], -(-q.shape[2] // page_size), -(-num_past // page_size)
        heads = 1 if self._rule.share == "all_heads" else summary.shape[2]
        rank = torch.rand(batch, blocks, heads, pages, device=q.device)
        self._force(rank)
        lists = torch.empty(batch, blocks, heads, budget, dtype=torch.int64, device=q.device)
        carried = int(self.carried_share * budget)
        for block in range(blocks):
            if block and carried:
                before = lists[:, block - 1]
                kept = before.gather(-1, torch.rand(before.shape, device=q.device).topk(carried)[1])
                rank[:, block].scatter_(-1, kept, 2.0)
            lists[:, block] = rank[:, block].topk(budget, dim=-1)[1]
        return lists.sort(dim=-1)[0].to(torch.int32)

    def _force(self, rank: torch.Tensor) -> None:
        rank[..., :FIRST] = 3.0
        rank[..., -LATEST:] = 3.0


class UniformSelector(SyntheticSelector):
    """Every page equally likely: the worst case for residency."""

    carried_share = 0.0

    def _force(self, rank: torch.Tensor) -> None:
        pass
