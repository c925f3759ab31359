"""Attention over a sequence's own chunk and its paged past, with gradients.

The registered operations take flat arguments, because an operation's schema knows tensors, numbers
and strings alone. They make the nouns that ``oomb._C`` takes inside.
"""

from __future__ import annotations

from typing import Any

import torch

from oomb import _C
from oomb.ops.arguments import (
    FLOATS,
    check_indices,
    check_int,
    check_once,
    check_range,
    check_slots,
    check_tensor,
    is_finite,
    refuse,
)
from oomb.ops.launch import stream_of, workspace_on
from oomb.ops.pages import check_pages, pool_of

_CAPS = 1e-30, 1e30  # in fp32 neither a cap nor one by it may overflow


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
    softcap: float,
    window: int,
    selection: torch.Tensor | None,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _outputs(q)
    _C.attention_forward(
        chunk=_chunk(q, k, v, scale, softcap, window, first_key, num_keys),
        past=_past(kv_pages, block_table, num_past, selection),
        output=_C.Output(o=o, lse=lse),
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
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
    softcap: float,
    window: int,
    selection: torch.Tensor | None,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (_tokens_first(x) for x in (q, k, v))
    gradients = None
    if dkv_pages is not None:
        table = block_table if dkv_table is None else dkv_table
        slots = table[..., None] * 2 + torch.arange(2, dtype=torch.int32, device=q.device)
        gradients = _C.GradientPages(
            pool=pool_of(dkv_pages, slots_each=2),
            table=slots.masked_fill(table[..., None] < 0, -1).contiguous(),
            dtype=str(dkv_pages.dtype).removeprefix("torch."),
        )
    _C.attention_backward(
        chunk=_chunk(q, k, v, scale, softcap, window, first_key, num_keys),
        past=_past(kv_pages, block_table, num_past, selection),
        output=_C.Output(o=o, lse=lse),
        d_output=_C.Output(o=d_o, lse=d_lse),
        d_chunk=_C.ChunkGradients(dq=dq, dk=dk, dv=dv),
        state=_C.BackwardState(delta=torch.empty_like(lse)),
        gradients=gradients,
        deterministic=deterministic,
        workspace=workspace_on(q.device),
        stream=stream_of(q.device),
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
    softcap: float | None = None,
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
            fp64 for fp64; None: the past receives no gradient. May be the tensor of kv_pages, in
            other slots.
        block_table: int32 [batch, pages]: slot of each past page, in order; -1: not resident.
            Sequences may share pages, but none that receive gradients.
        num_past: past tokens; None: all pages are full.
        scale: of the logits; None: head_dim ** -0.5.
        softcap: scaled logits s become softcap * tanh(s / softcap) before anything is hidden
            (Gemma 2, arXiv:2408.00118); None: they stay.
        dkv_table: int32 [batch, pages]: slot of each page's gradient in dkv_pages, -1 for none;
            None: as in block_table.
        window: tokens: a query sees its last ``window`` keys, itself included; 0: all.
        selection: int32 [batch, ceil(tokens / page_size), 1 or kv_heads, budget]: past pages that
            each block of page_size queries sees, ascending, -1 padded; None: all.
        first_key: int32 [batch, tokens]: first key a query sees, counted over past and chunk
            (packed documents); None: 0.
        num_keys: int32 [batch]: keys before a sequence's right padding; None: all. Pages of
            padding alone need a resident slot, which may be anybody's, and with dkv_pages a -1 in
            dkv_table.
        deterministic: False allows sums without a fixed order, where that is faster.
        check: look for pages out of range, not resident or listed twice. Synchronises with a GPU;
            False where lists are known to be right, or under ``torch.compile``.

    Returns:
        o [batch, heads, tokens, head_dim] in q's dtype, in memory tokens first (its
        transpose(1, 2) is contiguous), and lse [batch, heads, tokens], natural logarithm, fp32
        (fp64 for fp64). Both are differentiable. Rows that see nothing give o = 0, lse = -inf.

    Raises:
        ValueError: an argument does not fit; the text names it, what was expected and what came.
    """
    _check_chunk(q, k, v)
    _check_pages(kv_pages, dkv_pages, q, k)
    page_size = kv_pages.shape[3]
    _check_indices(q, k, page_size, block_table, dkv_table, selection, first_key, num_keys)
    if dkv_table is not None and dkv_pages is None:
        refuse("dkv_table", "None without dkv_pages", "a tensor")
    if dkv_table is not None and dkv_table.shape != block_table.shape:
        refuse("dkv_table", str(list(block_table.shape)), list(dkv_table.shape))
    num_past = block_table.shape[1] * page_size if num_past is None else num_past
    num_past = check_int("num_past", num_past, 0)
    window = check_int("window", window, 0, 2**63 - 1)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif not is_finite(scale):
        refuse("scale", "a finite number", repr(scale))
    if softcap is not None and not _is_cap(softcap):
        least, most = _CAPS
        refuse("softcap", f"a number of {least:g} .. {most:g} or None", repr(softcap))
    if not isinstance(deterministic, bool):
        refuse("deterministic", "a bool", repr(deterministic))
    if check:
        _check_tables(kv_pages, dkv_pages, block_table, dkv_table, selection, num_past)
        if num_keys is not None:
            check_range("num_keys", num_keys, 0, num_past + q.shape[2] + 1, "numbers")
    if dkv_pages is not None and dkv_pages.shape[0] == 0:
        dkv_pages = dkv_table = None
    out: tuple[torch.Tensor, torch.Tensor] = _paged_attention(
        q,
        k,
        v,
        kv_pages,
        dkv_pages,
        block_table,
        dkv_table,
        num_past,
        float(scale),
        0.0 if softcap is None else float(softcap),
        window,
        selection,
        first_key,
        num_keys,
        deterministic,
    )
    return out


def _is_cap(value: object) -> bool:
    least, most = _CAPS
    return is_finite(value) and not isinstance(value, bool) and least <= value <= most  # type: ignore[operator]


def _check_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check_tensor("q", q, ("batch", "heads", "tokens", "head_dim"), dtypes=FLOATS)
    batch, heads, tokens, head_dim = q.shape
    if head_dim == 0:
        refuse("q", "a head_dim >= 1", 0)
    shape = (batch, "kv_heads", tokens, head_dim)
    check_tensor("k", k, shape, dtypes=(q.dtype,), device=q.device)
    check_tensor("v", v, tuple(k.shape), dtypes=(q.dtype,), device=q.device)
    if k.shape[1] == 0 or heads % k.shape[1]:
        refuse("q", f"heads in groups for {k.shape[1]} kv heads", heads)


def _check_pages(
    kv_pages: torch.Tensor, dkv_pages: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> None:
    check_pages("kv_pages", kv_pages, k, (k.dtype,))
    if dkv_pages is None:
        return
    double = q.dtype == torch.float64
    dtypes = (torch.float64,) if double else (torch.float32, torch.bfloat16)
    check_pages("dkv_pages", dkv_pages, k, dtypes)
    if dkv_pages.shape[3] != kv_pages.shape[3]:
        refuse("dkv_pages", f"page_size {kv_pages.shape[3]}", dkv_pages.shape[3])


def _check_indices(
    q: torch.Tensor,
    k: torch.Tensor,
    page_size: int,
    block_table: torch.Tensor,
    dkv_table: torch.Tensor | None,
    selection: torch.Tensor | None,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
) -> None:
    batch, _, tokens, _ = q.shape
    check_indices("block_table", block_table, (batch, "pages"), q.device)
    if dkv_table is not None:
        check_indices("dkv_table", dkv_table, (batch, "pages"), q.device)
    if selection is not None:
        blocks = -(-tokens // page_size)
        check_indices("selection", selection, (batch, blocks, "heads", "budget"), q.device)
        if selection.shape[2] != 1 and selection.shape[2] != k.shape[1]:  # `in` is not traced
            refuse("selection", f"1 or {k.shape[1]} heads", selection.shape[2])
    if first_key is not None:
        check_indices("first_key", first_key, (batch, tokens), q.device)
    if num_keys is not None:
        check_indices("num_keys", num_keys, (batch,), q.device)


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
    if block_table.shape[1] < pages:
        expected = f"[batch, >= {pages}] for num_past {num_past}"
        refuse("block_table", expected, list(block_table.shape))
    if selection is None:
        check_slots("block_table", block_table[:, :pages], kv_pages.shape[0], least=0)
    else:
        check_slots("block_table", block_table[:, :pages], kv_pages.shape[0], least=-1)
        _check_selection(selection, block_table, pages)
    if dkv_pages is not None:
        name, table = ("block_table", block_table)
        if dkv_table is not None:
            name, table = ("dkv_table", dkv_table)
        table = table[:, :pages]
        check_slots(name, table, dkv_pages.shape[0], least=-1)
        check_once(name, table, "; give -1 in dkv_table for pages without gradient")
        if _meet(kv_pages, block_table[:, :pages], dkv_pages, table):
            refuse("dkv_pages", "other pages than those with keys and values", "some of kv_pages")


def _meet(
    kv_pages: torch.Tensor, kv_slots: torch.Tensor, dkv_pages: torch.Tensor, dkv_slots: torch.Tensor
) -> bool:
    """Whether slots that are read and slots that are written share memory: one pool, or views."""

    def begins(pool: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, int]:
        size = pool[:1].numel() * pool.element_size()
        return pool.data_ptr() + slots[slots >= 0].long() * size, size

    (read, read_size), (written, size) = begins(kv_pages, kv_slots), begins(dkv_pages, dkv_slots)
    if not read.numel():
        return False
    read = read.sort().values
    # Of all pages that begin before a written one ends, the last is the one that may reach it.
    last = torch.searchsorted(read, written + size) - 1
    before = last >= 0
    return bool((read[last[before]] + read_size > written[before]).any())


def _check_selection(selection: torch.Tensor, block_table: torch.Tensor, pages: int) -> None:
    listed = selection[selection >= 0]
    if listed.numel() and int(listed.max()) >= pages:
        refuse("selection", f"past pages below {pages}", int(listed.max()))
    after, before = selection[..., 1:], selection[..., :-1]
    ordered = ((before >= 0) & (after > before)) | (after < 0)
    if not bool(ordered.all()):
        refuse("selection", "ascending pages, -1 padded", "duplicates or disorder")
    if not listed.numel():
        return
    sequence = torch.arange(selection.shape[0], device=selection.device).view(-1, 1, 1, 1)
    slots = block_table[sequence.expand_as(selection), selection.clamp(min=0).long()]
    if bool(((slots < 0) & (selection >= 0)).any()):
        refuse("block_table", "every listed page to be resident", -1)


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _tokens_first(q), q.new_empty(q.shape[:3], dtype=dtype)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, head_dim = x.shape
    return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None,
) -> _C.Chunk:
    visibility = _C.Visibility(window=window, first_key=first_key, num_keys=num_keys)
    return _C.Chunk(q=q, k=k, v=v, scale=scale, cap=softcap, visibility=visibility)


def _past(
    kv_pages: torch.Tensor, block_table: torch.Tensor, num_past: int, selection: torch.Tensor | None
) -> _C.PastPages:
    return _C.PastPages(
        page_size=kv_pages.shape[3],
        pool=pool_of(kv_pages),
        block_table=block_table,
        num_tokens=num_past,
        selection=selection,
    )
