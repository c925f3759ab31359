"""The choice of :class:`oomb.TopKPages`: pages by score, forced ones first."""

from __future__ import annotations

from typing import Protocol

import torch

from oomb import _C
from oomb.config import Past, TopKPages
from oomb.ops.launch import stream_of, workspace_on
from oomb.ops.page_bounds import bounding_queries


class OverRanks(Protocol):
    """Ranks that hold heads of the same queries."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        ...

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks."""
        ...


def top_k_lists(
    rule: TopKPages,
    q: torch.Tensor,
    summaries: torch.Tensor,
    past: Past,
    others: OverRanks | None = None,
) -> torch.Tensor:
    """Lists of a chunk's queries; shapes as of :meth:`oomb.PageRule.choose`.

    Args:
        others: ranks with the other heads; None: all heads are here.
    """
    batch, _, tokens, _ = q.shape
    heads = 1 if rule.share == "all_heads" else summaries.shape[2]
    blocks = -(-tokens // past.page_size)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    asked = q.detach()
    if rule.summary == "bounds":
        asked = bounding_queries(asked)
    scores = torch.empty(batch, blocks, heads, past.num_pages, dtype=dtype, device=q.device)
    _C.page_score(
        q=asked,
        summary=summaries,
        scores=scores,
        kind=rule.score,
        num_past=past.num_tokens,
        page_size=past.page_size,
        visibility=_C.Visibility(first_key=past.first_key, num_keys=past.num_keys),
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
    )
    if others is not None and rule.share == "all_heads":
        scores = others.total(scores)
    if rule.chunk_budget is not None:
        best = scores.amax(dim=(1, 2))  # [B, pages]
        if others is not None and rule.share == "kv_head":
            best = others.largest(best)
        _keep_best_of_chunk(scores, best, rule)
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


def _keep_best_of_chunk(scores: torch.Tensor, best: torch.Tensor, rule: TopKPages) -> None:
    """Leave at most ``chunk_budget`` pages of each sequence as candidates of its whole chunk.

    Pages rank by the highest score any block gives them; ties go to the lower page. Forced pages
    stay.
    """
    assert rule.chunk_budget is not None
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
