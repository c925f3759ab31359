"""Attention over a sequence's own chunk and its paged past, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from oomb import _C
from oomb.ops.launch import stream_of, workspace_on
from oomb.ops.pages import check_pages, check_slots


@torch.library.custom_op("oomb::paged_attention", mutates_args=())
def _paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    dkv_pages: torch.Tensor | None,
    block_table: torch.Tensor,
    dkv_table: torch.Tensor | None,
    num_past: int,
    scale: float,
    window: int,
    selection: torch.Tensor | None,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _outputs(q)
    past = _past(kv_pages, block_table, num_past, selection)
    _C.attention_forward(
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        scale=scale,
        window=window,
        first_key=first_key,
        num_keys=num_keys,
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
        **past,
    )
    return o, lse


@_paged_attention.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q)


@torch.library.custom_op("oomb::paged_attention_backward", mutates_args={"dkv_pages"})
def _paged_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    d_o: torch.Tensor,
    d_lse: torch.Tensor | None,
    kv_pages: torch.Tensor,
    dkv_pages: torch.Tensor | None,
    block_table: torch.Tensor,
    dkv_table: torch.Tensor | None,
    num_past: int,
    scale: float,
    window: int,
    selection: torch.Tensor | None,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (_tokens_first(x) for x in (q, k, v))
    gradients: dict[str, Any] = {}
    if dkv_pages is not None:
        table = block_table if dkv_table is None else dkv_table
        slots = table[..., None] * 2 + torch.arange(2, dtype=torch.int32, device=q.device)
        gradients = {
            "dkv_pool": dkv_pages.data_ptr(),
            "dkv_unit_bytes": dkv_pages[0, 0].numel() * dkv_pages.element_size(),
            "dkv_table": slots.masked_fill(table[..., None] < 0, -1).contiguous(),
            "dkv_dtype": str(dkv_pages.dtype).removeprefix("torch."),
        }
    _C.attention_backward(
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        d_o=d_o,
        d_lse=d_lse,
        dq=dq,
        dk=dk,
        dv=dv,
        delta=torch.empty_like(lse),
        scale=scale,
        window=window,
        first_key=first_key,
        num_keys=num_keys,
        deterministic=deterministic,
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
        **_past(kv_pages, block_table, num_past, selection),
        **gradients,
    )
    return dq, dk, dv


@_paged_attention_backward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _tokens_first(q), _tokens_first(k), _tokens_first(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)
    # Pages change between forward and backward by design (later chunks are written, gradients are
    # added), so they are not saved tensors, whose version autograd would check.
    ctx.rest = rest


def _backward(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else d_o
    if d_o.stride(-1) != 1 or 0 in d_o.stride():
        d_o = d_o.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    grads = _paged_attention_backward(q, k, v, o, lse, d_o, d_lse, *ctx.rest)
    return *grads, *(None for _ in ctx.rest)


_paged_attention.register_autograd(_backward, setup_context=_setup)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    dkv_pages: torch.Tensor | None,
    block_table: torch.Tensor,
    *,
    num_past: int | None = None,
    scale: float | None = None,
    dkv_table: torch.Tensor | None = None,
    window: int = 0,
    selection: torch.Tensor | None = None,
    first_key: torch.Tensor | None = None,
    num_keys: torch.Tensor | None = None,
    deterministic: bool = True,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a chunk over itself and over a past that lies in pages.

    The forward changes nothing. The backward returns the gradients of q, k, v and **adds** those of
    the past's keys and values to ``dkv_pages``, in place.

    Args:
        q: [batch, heads, tokens, head_dim], as in ``scaled_dot_product_attention``.
        k, v: [batch, kv_heads, tokens, head_dim]; heads is a multiple of kv_heads.
        kv_pages: [slots, 2, kv_heads, page_size, head_dim], dtype of q; see ``page_write``.
        dkv_pages: [slots, 2, kv_heads, page_size, head_dim]: fp32, bf16 (stochastic rounding) or
            fp64 for fp64; None: the past receives no gradient.
        block_table: int32 [batch, pages]: slot of each past page, in order; -1: not resident.
        num_past: past tokens; None: all pages are full.
        scale: of the logits; None: head_dim ** -0.5.
        dkv_table: int32 [batch, pages]: slot of each page's gradient in dkv_pages, -1 for none;
            None: as in block_table.
        window: a query sees its last ``window`` keys, itself included; 0: all.
        selection: int32 [batch, ceil(tokens / page_size), 1 or kv_heads, budget]: past pages that
            each block of page_size queries sees, ascending, -1 padded; None: all.
        first_key: int32 [batch, tokens]: first key a query sees, counted over past and chunk
            (packed documents); None: 0.
        num_keys: int32 [batch]: keys before a sequence's right padding; None: all.
        deterministic: False allows sums without a fixed order, where that is faster.
        check: look for pages out of range, not resident or listed twice. Synchronises with a GPU.

    Returns:
        o [batch, heads, tokens, head_dim] and lse [batch, heads, tokens], natural logarithm, fp32
        (fp64 for fp64). Both are differentiable. Rows that see nothing give o = 0, lse = -inf.

    Raises:
        ValueError: an argument does not fit; the text names it, what was expected and what came.
    """
    check_pages("kv_pages", kv_pages, k)
    page_size = kv_pages.shape[3]
    if dkv_pages is not None:
        check_pages("dkv_pages", dkv_pages, k)
        if dkv_pages.shape[3] != page_size:
            raise ValueError(f"dkv_pages: expected page_size {page_size}, got {dkv_pages.shape[3]}")
    num_past = block_table.shape[1] * page_size if num_past is None else num_past
    if check:
        _check_tables(kv_pages, dkv_pages, block_table, dkv_table, selection, num_past)
    out: tuple[torch.Tensor, torch.Tensor] = _paged_attention(
        q,
        k,
        v,
        kv_pages,
        dkv_pages,
        block_table,
        dkv_table,
        num_past,
        q.shape[-1] ** -0.5 if scale is None else scale,
        window,
        selection,
        first_key,
        num_keys,
        deterministic,
    )
    return out


def _check_tables(
    kv_pages: torch.Tensor,
    dkv_pages: torch.Tensor | None,
    block_table: torch.Tensor,
    dkv_table: torch.Tensor | None,
    selection: torch.Tensor | None,
    num_past: int,
) -> None:
    page_size = kv_pages.shape[3]
    pages = -(-num_past // page_size)
    if block_table.ndim != 2 or block_table.shape[1] < pages:
        raise ValueError(
            f"block_table: expected [batch, >= {pages}] for num_past {num_past}, "
            f"got {list(block_table.shape)}"
        )
    if selection is None:
        check_slots("block_table", block_table[:, :pages], kv_pages.shape[0], least=0)
    else:
        check_slots("block_table", block_table, kv_pages.shape[0], least=-1)
        _check_selection(selection, block_table, pages)
    if dkv_pages is not None:
        table = block_table if dkv_table is None else dkv_table
        check_slots("dkv_table", table, dkv_pages.shape[0], least=-1)


def _check_selection(selection: torch.Tensor, block_table: torch.Tensor, pages: int) -> None:
    listed = selection[selection >= 0]
    if listed.numel() and int(listed.max()) >= pages:
        raise ValueError(f"selection: expected past pages below {pages}, got {int(listed.max())}")
    after, before = selection[..., 1:], selection[..., :-1]
    ordered = (after > before) | (after < 0)
    if not bool(ordered.all()):
        raise ValueError(
            "selection: expected ascending pages, -1 padded, got duplicates or disorder"
        )
    sequence = torch.arange(selection.shape[0], device=selection.device).view(-1, 1, 1, 1)
    slots = block_table[sequence.expand_as(selection), selection.clamp(min=0).long()]
    if bool(((slots < 0) & (selection >= 0)).any()):
        raise ValueError("block_table: expected every listed page to be resident, got -1")


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _tokens_first(q), q.new_empty(q.shape[:3], dtype=dtype)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, head_dim = x.shape
    return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


def _past(
    kv_pages: torch.Tensor, block_table: torch.Tensor, num_past: int, selection: torch.Tensor | None
) -> dict[str, Any]:
    page_size = kv_pages.shape[3]
    return {
        "page_size": page_size,
        "kv_pool": kv_pages.data_ptr(),
        "kv_slot_bytes": kv_pages[0].numel() * kv_pages.element_size(),
        "kv_num_slots": kv_pages.shape[0],
        "block_table": block_table,
        "num_past": num_past,
        "page_begin": 0,
        "page_end": -(-num_past // page_size),
        "selection": selection,
    }
