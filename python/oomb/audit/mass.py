"""How much of the attention falls on the pages that were selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb.audit.outputs import LayerAttention
from oomb.model.interface import soft_capped

_SLAB_PAGES = 32  # of keys at a time: what bounds the memory of a block's scores


@dataclass
class Mass:
    """Sums over query rows and heads; a row's attention over all keys is 1.

    Attributes:
        seen: attention to what the row saw; ``rows`` of them.
        past_seen, past: attention to the chosen pages and to all earlier chunks, of rows that had
            to choose.
    """

    rows: int = 0
    seen: float = 0.0
    past_seen: float = 0.0
    past: float = 0.0


def attention_mass(
    attention: LayerAttention,
    blocks: list[int],
    lists: list[torch.Tensor | None],
    *,
    chunk_size: int,
    page_size: int,
    device: torch.device,
) -> Mass:
    """Attention of a layer's sampled query blocks, in fp32 (fp64 for fp64 models).

    Args:
        blocks: sampled query blocks, ascending; ``attention.queries`` has their rows.
        lists: per chunk [B, query_blocks, heads or 1, <= budget] pages, -1 padded; None: all.
    """
    mass, row, tokens = Mass(), 0, attention.keys.shape[2]
    wide = torch.float64 if attention.keys.dtype == torch.float64 else torch.float32
    per_chunk = chunk_size // page_size
    for block in blocks:
        first, last = block * page_size, min((block + 1) * page_size, tokens)
        if last <= first:
            break
        queries = attention.queries[:, :, row : row + last - first].to(device, wide)
        row += last - first
        chosen = lists[block // per_chunk]
        pages = None if chosen is None else chosen[:, block % per_chunk].to(device)
        _add_block(mass, attention, queries, pages, first, chunk_size, page_size)
    return mass


def _add_block(
    mass: Mass,
    attention: LayerAttention,
    queries: torch.Tensor,
    pages: torch.Tensor | None,
    first: int,
    chunk_size: int,
    page_size: int,
) -> None:
    """One block of queries [B, Hq, rows, D] that starts at token ``first``."""
    batch, heads, rows, head_dim = queries.shape
    kv_heads = attention.keys.shape[1]
    queries = queries.view(batch, kv_heads, heads // kv_heads, rows, head_dim) * attention.scale
    begin = first - first % chunk_size  # of the block's chunk
    mass.rows += batch * heads * rows
    if pages is None:
        mass.seen += batch * heads * rows
        return

    def scores(low: int, high: int) -> torch.Tensor:
        keys = attention.keys[:, :, low:high].to(queries.device, queries.dtype)
        scaled = queries @ keys[:, :, None].transpose(-1, -2)  # [B, Hkv, group, rows, keys]
        return soft_capped(scaled, attention.softcap)

    own = scores(begin, first + rows)
    index = torch.arange(begin, first + rows, device=queries.device)
    future = index > torch.arange(first, first + rows, device=queries.device)[:, None]
    own_lse = own.masked_fill(future, -torch.inf).logsumexp(-1)
    past_lse = torch.full_like(own_lse, -torch.inf)
    chosen_lse = torch.full_like(own_lse, -torch.inf)
    listed = _listed(pages, begin // page_size)
    for page in range(0, begin // page_size, _SLAB_PAGES):
        low, high = page * page_size, min((page + _SLAB_PAGES) * page_size, begin)
        slab = scores(low, high)
        past_lse = torch.logaddexp(past_lse, slab.logsumexp(-1))
        seen = listed[:, :, low // page_size : high // page_size].repeat_interleave(page_size, -1)
        hidden = ~seen[:, :, None, None]
        chosen_lse = torch.logaddexp(chosen_lse, slab.masked_fill(hidden, -torch.inf).logsumexp(-1))
    total = torch.logaddexp(own_lse, past_lse)
    mass.seen += float((torch.logaddexp(own_lse, chosen_lse) - total).exp().double().sum())
    mass.past_seen += float((chosen_lse - total).exp().double().sum())
    mass.past += float((past_lse - total).exp().double().sum())


def _listed(pages: torch.Tensor, number: int) -> torch.Tensor:
    """[B, heads or 1, number] bool from lists [B, heads or 1, budget], -1 padded."""
    listed = torch.zeros(*pages.shape[:2], number + 1, dtype=torch.bool, device=pages.device)
    listed.scatter_(2, torch.where(pages < 0, number, pages).long(), True)
    return listed[..., :number]
