"""Bounds of a page's keys: the most that a query's product with any key of the page can be.

Per page the highest and the lowest of each number of its keys; then

    q · k  <=  sum over d of max(q_d * highest_d, q_d * lowest_d)
            =  [max(q, 0), max(-q, 0)] · [highest, -lowest]

so a bound is a product of vectors of twice the head dim, and scored as mean keys are. One key that
matters among a page of others shows in the bound; in the mean of 64 keys it is one part in 64.

Source: Quest (Tang, Zhao, Zhu, Xiao, Kasikci and Han, ICML 2024, arXiv 2406.10774), §3.3.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from oomb.ops.arguments import FLOATS, check_int, check_tensor

_INTEGERS = (torch.int32, torch.int64)


def page_bounds(
    k: torch.Tensor, page_size: int, num_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Bounds of the pages of keys.

    Args:
        k: [batch, kv_heads, tokens, head_dim], after RoPE.
        page_size: tokens of a page; the last one may be partial.
        num_rows: int32 or int64 [batch], real tokens of each sequence, before its right padding;
            None: all.

    Returns:
        [batch, pages, kv_heads, 2 * head_dim] of k's dtype: the highest, then the lowest with its
        sign turned. Zero for a page without a real token.

    Raises:
        ValueError: an argument does not fit.
    """
    check_tensor("k", k, ("batch", "kv_heads", "tokens", "head_dim"), dtypes=FLOATS)
    page_size = check_int("page_size", page_size, 1)
    if num_rows is not None:
        check_tensor("num_rows", num_rows, (k.shape[0],), dtypes=_INTEGERS, device=k.device)
    tokens = k.shape[2]
    missing = -tokens % page_size
    real = torch.arange(tokens, device=k.device).expand(k.shape[0], -1)
    limit = tokens if num_rows is None else num_rows[:, None]
    real = F.pad(real < limit, (0, missing)).unflatten(1, (-1, page_size))
    signed = torch.cat([k, -k], dim=-1)
    pages = F.pad(signed, (0, 0, 0, missing)).unflatten(2, (-1, page_size))
    hidden = ~real[:, None, :, :, None]
    bounds = pages.masked_fill(hidden, -torch.inf).amax(dim=3).transpose(1, 2)
    found: torch.Tensor = bounds.masked_fill(~real.any(dim=2)[:, :, None, None], 0)
    return found


def bounding_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries whose products with bounds of pages are the bounds of their products with keys.

    Args:
        q: [batch, heads, tokens, head_dim], after RoPE.

    Returns:
        [batch, heads, tokens, 2 * head_dim] of q's dtype: what is positive in q, then in -q.

    Raises:
        ValueError: q is no such tensor.
    """
    check_tensor("q", q, ("batch", "heads", "tokens", "head_dim"), dtypes=FLOATS)
    return torch.cat([q, -q], dim=-1).clamp(min=0)
