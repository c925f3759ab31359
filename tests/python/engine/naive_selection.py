"""TopKPages in plain loops over fp64 scores."""

from __future__ import annotations

import torch

import oomb

from .dense_mask import Visible


def scores_of_chunk(
    rule: oomb.TopKPages, visible: Visible, q: torch.Tensor, k: torch.Tensor, chunk: int
) -> torch.Tensor:
    """[batch, blocks, heads, past pages]; -inf where a page is no candidate, NaN for blocks of
    padding alone, whose choice has no meaning.

    The last token of all predicts nothing, so it is not run and not part of its block's mean."""
    page = visible.page_size
    begin = chunk * visible.chunk_size
    end = min(begin + visible.chunk_size, visible.tokens - 1)
    pages, kv_heads = begin // page, k.shape[1]
    group = q.shape[1] // kv_heads
    blocks = -(-(end - begin) // page)
    result = torch.full((visible.batch, blocks, kv_heads, pages), -torch.inf, dtype=torch.float64)
    for b in range(visible.batch):
        length = visible.tokens if visible.lengths is None else int(visible.lengths[b])
        for block in range(blocks):
            first = begin + block * page
            last = min(first + page, end, length)
            if last <= first:
                result[b, block] = torch.nan
                continue
            low = 0 if visible.document_start is None else int(visible.document_start[b, first])
            candidates = [p for p in range(pages) if (p + 1) * page > low and p * page < length]
            for h in range(kv_heads if candidates else 0):
                heads = slice(h * group, (h + 1) * group)
                keys = [k[b, h, p * page : min((p + 1) * page, length)] for p in candidates]
                products = _products(rule, q[b, heads, first:last], keys)
                if rule.score == "block_mean":
                    values = products.mean(dim=(0, 1))
                else:
                    values = products.sum(dim=0).softmax(-1).sum(0)
                result[b, block, h, candidates] = values
    return result.sum(dim=2, keepdim=True) if rule.share == "all_heads" else result


def _products(
    rule: oomb.TopKPages, queries: torch.Tensor, keys: list[torch.Tensor]
) -> torch.Tensor:
    """Of queries [heads, tokens, head_dim] and pages of keys: [heads, tokens, pages]."""
    if rule.summary == "mean":
        return torch.stack([queries @ page.mean(0) for page in keys], dim=-1)
    return torch.stack(
        [(queries[:, :, None] * torch.stack([page.amax(0), page.amin(0)])).amax(2).sum(2)
         for page in keys], dim=-1
    )  # fmt: skip


def keep_best_of_chunk(scores: torch.Tensor, rule: oomb.TopKPages) -> torch.Tensor:
    """``chunk_budget``: the pages with the highest score of any block stay candidates."""
    if rule.chunk_budget is None or scores.shape[-1] <= rule.chunk_budget:
        return scores
    scores = scores.clone()
    for sequence in scores:
        best = sequence.nan_to_num(-torch.inf).amax(dim=(0, 1)).tolist()
        pages = len(best)
        forced = set(range(rule.sink_pages)) | set(range(pages - rule.recent_pages, pages))
        ranked = sorted(range(pages), key=lambda p: (p not in forced, -best[p], p))
        sequence[..., ranked[rule.chunk_budget :]] = -torch.inf
    return scores


def select(row: list[float], budget: int, sink_pages: int, recent_pages: int) -> list[int]:
    """The best pages of one row, ascending, -1 padded."""
    candidates = [p for p, score in enumerate(row) if score > -torch.inf]
    forced = set(candidates[:sink_pages])
    forced |= set(candidates[len(candidates) - recent_pages :]) if recent_pages else set()
    ranked = sorted(candidates, key=lambda p: (p not in forced, -row[p], p))[:budget]
    return sorted(ranked) + [-1] * (budget - len(ranked))
