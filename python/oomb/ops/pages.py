"""Pages: making them, writing them, scoring them and choosing among them."""

from __future__ import annotations

import torch

from oomb import _C
from oomb.ops.launch import stream_of, workspace_on


def pages_like(
    k: torch.Tensor, num_pages: int, page_size: int, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A zeroed pool of pages for keys and values such as ``k`` [batch, kv_heads, tokens, head_dim].

    Returns:
        [num_pages, 2 (K, V), kv_heads, page_size, head_dim] of ``dtype``, by default that of k. For
        gradients of bf16 keys pass ``torch.float32``.
    """
    shape = (num_pages, 2, k.shape[1], page_size, k.shape[3])
    return torch.zeros(shape, dtype=dtype or k.dtype, device=k.device)


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
        kv_pool=kv_pages.data_ptr(),
        kv_slot_bytes=kv_pages[0].numel() * kv_pages.element_size(),
        slots=slots,
        page_begin=0,
        page_end=-(-k.shape[2] // kv_pages.shape[3]),
        page_size=kv_pages.shape[3],
        num_rows=num_rows,
        summary=summary,
        stream=stream_of(k.device),
    )


@_page_write.register_fake
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slots: torch.Tensor,
    num_rows: torch.Tensor | None,
    summary: torch.Tensor | None,
) -> None:
    return None


def page_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_rows: torch.Tensor | None = None,
    summary: torch.Tensor | None = None,
) -> None:
    """Write keys and values into pages; the rest of a last, partial page becomes zero.

    Args:
        k, v: [batch, kv_heads, tokens, head_dim], after RoPE.
        kv_pages: [slots, 2, kv_heads, page_size, head_dim], written in place.
        slots: int32 [batch, ceil(tokens / page_size)]: slot of each page; -1 skips it.
        num_rows: int32 [batch], real tokens of each sequence; None: all.
        summary: [batch, pages, kv_heads, head_dim], receives each page's mean key, or None.

    Raises:
        ValueError: an argument's shape, dtype or device does not fit, or a slot is out of range.
    """
    check_pages("kv_pages", kv_pages, k)
    check_slots("slots", slots, kv_pages.shape[0], least=-1)
    _page_write(k.detach(), v.detach(), kv_pages, slots, num_rows, summary)


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
        summary: [batch, pages, kv_heads, head_dim], mean keys of the pages.
        num_past: past tokens.
        score: ``"block_mean"`` or ``"token_softmax"`` (the rule of the OOMB paper).
        share: ``"all_heads"`` or ``"kv_head"``.
        first_key: int32 [batch, tokens], first key a query may see; None: 0.
        num_keys: int32 [batch], keys before a sequence's padding; None: all.

    Returns:
        [batch, ceil(tokens / page_size), 1 or kv_heads, pages] fp32 (fp64 for fp64); -inf where the
        block may not see the page.
    """
    heads = {"all_heads": 1, "kv_head": summary.shape[2]}.get(share)
    if heads is None:
        raise ValueError(f"share: expected 'all_heads' or 'kv_head', got {share!r}")
    blocks, pages = -(-q.shape[2] // page_size), -(-num_past // page_size)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.empty(q.shape[0], blocks, heads, pages, dtype=dtype, device=q.device)
    _C.page_score(
        q=q.detach(),
        summary=summary,
        scores=scores,
        kind=score,
        num_past=num_past,
        page_size=page_size,
        first_key=first_key,
        num_keys=num_keys,
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
    )
    return scores


def page_select(
    scores: torch.Tensor, budget: int, *, sink_pages: int = 0, recent_pages: int = 0
) -> torch.Tensor:
    """The ``budget`` best pages of each row: ties to the lower page, ascending, -1 padded.

    Args:
        scores: [batch, blocks, heads, pages] as from :func:`page_scores`; -inf is never chosen.
        sink_pages, recent_pages: first and last candidates that are always chosen.

    Returns:
        int32 [batch, blocks, heads, budget].
    """
    if budget < 1:
        raise ValueError(f"budget: expected an int >= 1, got {budget}")
    selection = torch.empty(*scores.shape[:3], budget, dtype=torch.int32, device=scores.device)
    _C.page_select(
        scores=scores,
        selection=selection,
        budget=budget,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        stream=stream_of(scores.device),
    )
    return selection


def check_pages(argument: str, pages: torch.Tensor, k: torch.Tensor) -> None:
    """Raise ValueError unless ``pages`` is a contiguous pool of pages for keys such as ``k``."""
    heads, head_dim = k.shape[1], k.shape[3]
    fits = pages.ndim == 5 and pages.shape[1:3] == (2, heads) and pages.shape[4] == head_dim
    if not fits:
        raise ValueError(
            f"{argument}: expected [slots, 2, {heads}, page_size, {head_dim}], "
            f"got {list(pages.shape)}"
        )
    if not pages.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {pages.stride()}")
    if pages.device != k.device:
        raise ValueError(f"{argument}: expected device {k.device}, got {pages.device}")


def check_slots(argument: str, slots: torch.Tensor, num_slots: int, least: int) -> None:
    """Raise ValueError unless all slots lie in [least, num_slots). Synchronises with a GPU."""
    if slots.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(slots))
    if low < least or high >= num_slots:
        raise ValueError(
            f"{argument}: expected slots in [{least}, {num_slots}), got {low} … {high}"
        )
