"""Which past pages each block of queries sees."""

from __future__ import annotations

import torch

from oomb import _C
from oomb.config import TopKPages
from oomb.core.layout import Chunks
from oomb.ops.launch import stream_of, workspace_on


class Selector:
    """Chooses the past pages of each block of queries under :class:`oomb.TopKPages`."""

    def __init__(self, rule: TopKPages, chunks: Chunks, num_layers: int) -> None:
        self._rule = rule
        self._chunks = chunks
        self._num_layers = num_layers

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
        """Lists of a chunk's queries, whose past holds more pages than the budget.

        Args:
            q: [B, Hq, C, D]. No gradient flows through the choice.
            summary: [B, pages, Hkv, D] mean keys.

        Returns:
            int32 [B, query blocks, heads or 1, budget], ascending, -1 padded.
        """
        rule, page_size = self._rule, self._chunks.page_size
        batch, _, tokens, _ = q.shape
        heads = 1 if rule.share == "all_heads" else summary.shape[2]
        blocks, num_pages = -(-tokens // page_size), -(-num_past // page_size)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = torch.empty(batch, blocks, heads, num_pages, dtype=dtype, device=q.device)
        _C.page_score(
            q=q.detach(),
            summary=summary,
            scores=scores,
            kind=rule.score,
            num_past=num_past,
            page_size=page_size,
            first_key=first_key,
            num_keys=num_keys,
            workspace=workspace_on(q.device),
            stream=stream_of(q.device),
        )
        if rule.chunk_budget is not None:
            _keep_best_of_chunk(scores, rule)
        shape = (batch, blocks, heads, rule.budget)
        lists = torch.empty(shape, dtype=torch.int32, device=q.device)
        _C.page_select(
            scores=scores,
            selection=lists,
            budget=rule.budget,
            sink_pages=rule.sink_pages,
            recent_pages=rule.recent_pages,
            stream=stream_of(q.device),
        )
        return lists


def _keep_best_of_chunk(scores: torch.Tensor, rule: TopKPages) -> None:
    """Leave at most ``chunk_budget`` pages of each sequence as candidates of its whole chunk.

    Pages rank by the highest score any block gives them; ties go to the lower page. Forced pages
    stay.
    """
    assert rule.chunk_budget is not None
    best = scores.amax(dim=(1, 2))  # [B, pages]
    num_pages = best.shape[1]
    if num_pages <= rule.chunk_budget:
        return
    forced = torch.zeros(num_pages, dtype=torch.bool, device=scores.device)
    forced[: rule.sink_pages] = True
    forced[num_pages - rule.recent_pages :] = rule.recent_pages > 0
    ranked = best.masked_fill(forced, torch.inf).sort(dim=1, descending=True, stable=True).indices
    dropped = torch.ones_like(best, dtype=torch.bool)
    dropped.scatter_(1, ranked[:, : rule.chunk_budget], False)
    scores.masked_fill_(dropped[:, None, None, :], -torch.inf)
