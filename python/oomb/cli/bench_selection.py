"""Page lists that do not depend on random weights, which may choose kindly."""

from __future__ import annotations

from functools import lru_cache

import torch

from oomb.config import TopKPages
from oomb.core.layout import Chunks
from oomb.core.selection import Selector

FIRST, LATEST = 4, 8


class SyntheticSelector(Selector):
    """4 first pages, 8 latest, half carried over from the previous block, the rest random.

    The lists are drawn once, before a step is timed; in the step the real choice is computed too,
    so that its cost counts, and then replaced.
    """

    carried_share = 0.5
    forced = True

    @classmethod
    def prepare(
        cls, rule: TopKPages, chunks: Chunks, num_layers: int, kv_heads: int, device: torch.device
    ) -> None:
        """Draw the lists of a call with one sequence."""
        heads = 1 if rule.share == "all_heads" else kv_heads
        for chunk in range(chunks.number):
            shape = (num_layers, chunks.first_page(1), heads)
            _drawn(*cls._kind(rule.budget), chunks.first_page(chunk), shape, str(device))

    @classmethod
    def _kind(cls, budget: int) -> tuple[int, int, bool]:
        return budget, int(cls.carried_share * budget), cls.forced

    def choose(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        summary: torch.Tensor,
        num_past: int,
        first_key: torch.Tensor | None,
        num_keys: torch.Tensor | None,
    ) -> torch.Tensor:
        real = super().choose(layer, chunk, q, summary, num_past, first_key, num_keys)
        shape = (self._num_layers, self._chunks.first_page(1), real.shape[2])
        past = self._chunks.first_page(chunk)
        lists = _drawn(*self._kind(self._rule.budget), past, shape, str(q.device))
        return lists[layer, :, : real.shape[1]].expand_as(real).contiguous()


class UniformSelector(SyntheticSelector):
    """Every page equally likely: the worst case for residency."""

    carried_share = 0.0
    forced = False


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
