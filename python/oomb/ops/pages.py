"""Pages: making them, writing them, scoring them and choosing among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch

from oomb import _C
from oomb.config import Score
from oomb.ops.arguments import (
    FLOATS,
    check_indices,
    check_int,
    check_once,
    check_range,
    check_slots,
    check_tensor,
    expect_no_gradient,
    refuse,
)
from oomb.ops.launch import stream_of, workspace_on

_ROWS = ("batch", "kv_heads", "tokens", "head_dim")


def pages_like(
    k: torch.Tensor, num_pages: int, page_size: int, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A zeroed pool of pages for keys and values such as ``k``, on its device.

    Args:
        k: [batch, kv_heads, tokens, head_dim], fp64, fp32, fp16 or bf16; its values are not read.
        num_pages: slots of the pool; each takes 2 * kv_heads * page_size * head_dim values.
        page_size: tokens per page. The fast GPU kernels take 64 and 128.
        dtype: None: that of k. For gradients of 16-bit keys pass ``torch.float32``.

    Returns:
        [num_pages, 2 (K, V), kv_heads, page_size, head_dim].

    Raises:
        ValueError: an argument does not fit.
    """
    check_tensor("k", k, _ROWS, dtypes=FLOATS)
    check_int("num_pages", num_pages, 0)
    check_int("page_size", page_size, 1)
    if dtype is not None and dtype not in FLOATS:
        refuse("dtype", " or ".join(map(str, FLOATS)), repr(dtype))
    shape = (num_pages, 2, k.shape[1], page_size, k.shape[3])
    return torch.zeros(shape, dtype=dtype or k.dtype, device=k.device)


def pool_of(pages: torch.Tensor, slots_each: int = 1) -> _C.PagePool:
    """Pages as kernels find them; a pool may have none.

    Args:
        slots_each: slots in which a page is counted.

    Raises:
        ValueError: the pool is not contiguous, so that its slots do not lie one behind the other.
    """
    if not pages.is_contiguous():
        refuse("kv_pages, dkv_pages", "contiguous tensors", f"strides {pages.stride()}")
    return _C.PagePool(
        address=pages.data_ptr(),
        slot_bytes=math.prod(pages.shape[1:]) * pages.element_size() // slots_each,
        num_slots=pages.shape[0] * slots_each,
    )


@torch.library.custom_op("oomb::page_write", mutates_args={"kv_pages", "summary"})
def _page_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slots: torch.Tensor,
    num_rows: torch.Tensor | None,
    summary: torch.Tensor | None,
) -> None:
    _C.page_write(
        k=k,
        v=v,
        pool=pool_of(kv_pages),
        slots=slots,
        page_begin=0,
        page_end=-(-k.shape[2] // kv_pages.shape[3]),
        page_size=kv_pages.shape[3],
        num_rows=num_rows,
        summary=summary,
        stream=stream_of(k.device),
    )


@_page_write.register_fake
def _(*_: Any) -> None:
    return None


def page_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_rows: torch.Tensor | None = None,
    summary: torch.Tensor | None = None,
    check: bool = True,
) -> None:
    """Write keys and values into pages; the rest of a last, partial page becomes zero.

    Args:
        k, v: [batch, kv_heads, tokens, head_dim], after RoPE.
        kv_pages: [slots, 2, kv_heads, page_size, head_dim], written in place.
        slots: int32 [batch, ceil(tokens / page_size)]: slot of each page, none twice; -1 skips it.
        num_rows: int32 [batch], real tokens of each sequence, before its right padding; None: all.
        summary: [batch, pages, kv_heads, head_dim], receives each page's mean key over its real
            tokens, in the dtype of k; None: not made.
        check: look for slots out of range or given twice. Synchronises with a GPU; False where
            they are known to be right.

    Raises:
        ValueError: an argument's shape, dtype or device does not fit, or a slot is out of range.
    """
    check_tensor("k", k, _ROWS, dtypes=FLOATS)
    check_tensor("v", v, tuple(k.shape), dtypes=(k.dtype,), device=k.device)
    check_pages("kv_pages", kv_pages, k, (k.dtype,))
    batch, _, tokens, _ = k.shape
    check_indices("slots", slots, (batch, -(-tokens // kv_pages.shape[3])), k.device)
    if num_rows is not None:
        check_indices("num_rows", num_rows, (batch,), k.device)
    if summary is not None:
        shape = (batch, slots.shape[1], k.shape[1], k.shape[3])
        check_tensor("summary", summary, shape, dtypes=(k.dtype,), device=k.device)
        expect_no_gradient("summary", summary)
    if check:
        check_slots("slots", slots, kv_pages.shape[0], least=-1)
        check_once("slots", slots)
        if num_rows is not None:
            check_range("num_rows", num_rows, 0, tokens + 1, "numbers")
    _page_write(k.detach(), v.detach(), kv_pages, slots, num_rows, summary)


@torch.library.custom_op("oomb::page_scores", mutates_args=())
def _page_scores(
    q: torch.Tensor,
    summary: torch.Tensor,
    num_past: int,
    page_size: int,
    score: str,
    share: str,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
) -> torch.Tensor:
    scores = _empty_scores(q, summary, num_past, page_size, share)
    _C.page_score(
        q=q,
        summary=summary,
        scores=scores,
        kind=score,
        num_past=num_past,
        page_size=page_size,
        visibility=_C.Visibility(first_key=first_key, num_keys=num_keys),
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
    )
    return scores


@_page_scores.register_fake
def _(
    q: torch.Tensor,
    summary: torch.Tensor,
    num_past: int,
    page_size: int,
    score: str,
    share: str,
    *_: Any,
) -> torch.Tensor:
    return _empty_scores(q, summary, num_past, page_size, share)


def _empty_scores(
    q: torch.Tensor, summary: torch.Tensor, num_past: int, page_size: int, share: str
) -> torch.Tensor:
    heads = 1 if share == "all_heads" else summary.shape[2]
    blocks, pages = -(-q.shape[2] // page_size), -(-num_past // page_size)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((q.shape[0], blocks, heads, pages), dtype=dtype)


def page_scores(
    q: torch.Tensor,
    summary: torch.Tensor,
    num_past: int,
    page_size: int,
    *,
    score: str = "block_mean",
    share: str = "all_heads",
    first_key: torch.Tensor | None = None,
    num_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of every past page for every block of ``page_size`` queries (no gradient).

    Args:
        q: [batch, heads, tokens, head_dim].
        summary: [batch, pages, kv_heads, head_dim] in q's dtype, mean keys of the pages, as from
            ``page_write``. Or bounds from ``page_bounds``, and ``bounding_queries(q)`` for q.
        num_past: past tokens.
        page_size: tokens per page, and queries per block.
        score: as :attr:`oomb.TopKPages.score`.
        share: ``"all_heads"`` (one score for all heads) or ``"kv_head"`` (one for each KV head).
        first_key: int32 [batch, tokens], first key a query may see; None: 0.
        num_keys: int32 [batch], keys before a sequence's padding; None: all.

    Returns:
        [batch, ceil(tokens / page_size), 1 or kv_heads, pages] fp32 (fp64 for fp64); -inf where the
        block may not see the page.

    Raises:
        ValueError: an argument does not fit.
    """
    check_tensor("q", q, ("batch", "heads", "tokens", "head_dim"), dtypes=FLOATS)
    num_past = check_int("num_past", num_past, 0)
    page_size = check_int("page_size", page_size, 1)
    shape = (q.shape[0], "pages", "kv_heads", q.shape[3])
    check_tensor("summary", summary, shape, dtypes=(q.dtype,), device=q.device)
    pages = -(-num_past // page_size)
    if summary.shape[1] < pages:
        refuse("summary", f"rows of {pages} pages", summary.shape[1])
    _check_counts(q, first_key, num_keys)
    if score not in get_args(Score):
        refuse("score", " or ".join(map(repr, get_args(Score))), repr(score))
    if share not in ("all_heads", "kv_head"):
        refuse("share", "'all_heads' or 'kv_head'", repr(share))
    out: torch.Tensor = _page_scores(
        q.detach(), summary.detach(), num_past, page_size, score, share, first_key, num_keys
    )
    return out


@torch.library.custom_op("oomb::page_select", mutates_args=())
def _page_select(
    scores: torch.Tensor, budget: int, sink_pages: int, recent_pages: int
) -> torch.Tensor:
    selection = _empty_selection(scores, budget)
    _C.page_select(
        scores=scores,
        selection=selection,
        budget=budget,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        stream=stream_of(scores.device),
    )
    return selection


@_page_select.register_fake
def _(scores: torch.Tensor, budget: int, sink_pages: int, recent_pages: int) -> torch.Tensor:
    return _empty_selection(scores, budget)


def _empty_selection(scores: torch.Tensor, budget: int) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:3], budget), dtype=torch.int32)


def page_select(
    scores: torch.Tensor, budget: int, *, sink_pages: int = 0, recent_pages: int = 0
) -> torch.Tensor:
    """The ``budget`` best pages of each row: ties to the lower page, ascending, -1 padded.

    Args:
        scores: [batch, blocks, heads, pages] as from :func:`page_scores`; -inf is never chosen.
        budget: pages per row; where it has fewer candidates, all of them.
        sink_pages, recent_pages: first and last candidates that are always chosen, within the
            budget.

    Returns:
        int32 [batch, blocks, heads, budget], as ``selection`` of ``paged_attention``.

    Raises:
        ValueError: an argument does not fit.
    """
    dtypes = (torch.float32, torch.float64)
    check_tensor("scores", scores, ("batch", "blocks", "heads", "pages"), dtypes=dtypes)
    budget = check_int("budget", budget, 1)
    sink_pages = check_int("sink_pages", sink_pages, 0)
    recent_pages = check_int("recent_pages", recent_pages, 0)
    if sink_pages + recent_pages > budget:
        refuse("sink_pages + recent_pages", f"<= budget {budget}", sink_pages + recent_pages)
    out: torch.Tensor = _page_select(scores.detach(), budget, sink_pages, recent_pages)
    return out


def check_pages(
    argument: str, pages: torch.Tensor, k: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    """Raise ValueError unless ``pages`` is a contiguous pool of pages for keys such as ``k``."""
    shape = ("slots", 2, k.shape[1], "page_size", k.shape[3])
    check_tensor(argument, pages, shape, dtypes=dtypes, device=k.device)
    if pages.shape[3] == 0:
        refuse(argument, "a page_size >= 1", 0)
    if not pages.is_contiguous():
        refuse(argument, "a contiguous tensor", f"strides {pages.stride()}")
    expect_no_gradient(argument, pages)


def _check_counts(
    q: torch.Tensor, first_key: torch.Tensor | None, num_keys: torch.Tensor | None
) -> None:
    if first_key is not None:
        check_indices("first_key", first_key, (q.shape[0], q.shape[2]), q.device)
    if num_keys is not None:
        check_indices("num_keys", num_keys, (q.shape[0],), q.device)
