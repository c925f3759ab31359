"""Attention of one chunk over its own keys and its paged past, in waves of resident pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from oomb import _C
from oomb.engine.finite import expect_finite
from oomb.engine.layout import Chunks, Order
from oomb.engine.selection import Selector
from oomb.engine.shortage import with_torchs_unused
from oomb.engine.tiers import PageLayout
from oomb.hf.model import LayerShape
from oomb.ops.launch import stream_of, workspace_on

Wave = tuple[int, int]  # logical pages [begin, end)


class FillComplete(Exception):  # no error: the fill has all it needs
    """The last layer's keys and values are written; nothing behind them is needed."""


@dataclass
class CallPages:
    """Pages of one call: tables over the manager's memory, summaries, and what each chunk sees.

    Attributes:
        first_key, num_keys: as in :class:`oomb.engine.inputs.CallInputs`.
        swept: chunks that receive gradient, ascending.
        summaries: per layer [batch, pages, kv_heads, head_dim] mean keys, None where not needed.
        rounding_seed: of bf16 gradient pages.
        spilled: the device tier cannot hold the whole call.
        filled: chunks whose keys and values are written to pages.
        paired: two chunks of the fill take turns.
    """

    manager: _C.PageManager
    layout: PageLayout
    chunks: Chunks
    order: Order
    shapes: list[LayerShape]
    first_key: torch.Tensor | None
    num_keys: torch.Tensor | None
    swept: list[int]
    dkv_factor: float
    selector: Selector | None
    summaries: list[torch.Tensor | None]
    rounding_seed: int
    deterministic: bool
    check_finite: bool
    spilled: bool
    filled: int
    paired: bool
    tables: list[torch.Tensor] = field(default_factory=list)
    gradient_tables: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Launch:
    """One kernel of a visit: pages of a wave, None: of none; the first has the own chunk too."""

    pages: Wave | None
    first: bool
    last: bool

    @property
    def arguments(self) -> dict[str, Any]:
        begin, end = self.pages or (0, 0)
        return {
            "page_begin": begin,
            "page_end": end,
            "own_chunk": self.first,
            "first_wave": self.first,
            "last_wave": self.last,
        }


class ChunkAttention:
    """Attention of the chunk that is being run; one object per call of the engine."""

    _ids: ClassVar = itertools.count()
    active: ClassVar[dict[int, ChunkAttention]] = {}

    def __init__(self, pages: CallPages) -> None:
        self.pages = pages
        self.id = next(self._ids)
        self.chunk = 0
        self.phase = "fill"
        self.stop_at_last = False  # the fill ends at the last layer's keys and values
        self._unannounced: set[tuple[int, int]] = set()  # (layer, chunk) whose lists are new

    def __enter__(self) -> ChunkAttention:
        self.active[self.id] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self.active[self.id]

    # One chunk, one layer -------------------------------------------------------------------------

    def begin(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int
    ) -> None:
        """What comes before attention itself: pages of the chunk, and the choice of past pages.

        Raises:
            FillComplete: in a fill that ends here.
        """
        if self.phase == "fill" and self.chunk < self.pages.filled:
            self._write(layer, k, v)
            if self.stop_at_last and layer == len(self.pages.shapes) - 1:
                raise FillComplete
        self._select(layer, q, window)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B, Hq, C, D] and lse [B, Hq, C] of the current chunk, after :meth:`begin`."""
        order = self.pages.order
        visit = int((order.fill if self.phase == "fill" else order.read)[self.chunk, layer])
        selection = self._recorded(layer)
        self._announce(layer)
        batch, heads, tokens, head_dim = q.shape
        o = q.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(batch, heads, tokens, dtype=state_dtype, device=q.device)
        common = self._common(layer, q, k, v, scale, window, selection)

        launches = self._launches(visit)
        if len(launches) > 1:
            common["acc"] = torch.empty(
                batch, heads, tokens, head_dim, dtype=state_dtype, device=q.device
            )
            common["max"] = torch.empty_like(lse)
            common["sum"] = torch.empty_like(lse)
        for launch in launches:
            with self._resident(visit, launch.pages):
                _C.attention_forward(**common, **launch.arguments, o=o, lse=lse)
        return o, lse

    def backward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k, v; adds to the gradient pages of the past and ends the chunk's own."""
        pages = self.pages
        visit = int(pages.order.accumulate[self.chunk, layer])
        selection = self._recorded(layer)
        if not _dense_in_head(d_o):
            d_o = d_o.contiguous()
        dq, dk, dv = (_like_tokens_first(x) for x in (q, k, v))
        common = self._common(layer, q, k, v, scale, window, selection)
        common |= self._gradients(layer)
        common |= {"o": o, "d_o": d_o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        common |= {
            "d_lse": d_lse,
            "deterministic": pages.deterministic,
            "delta": torch.empty_like(lse),
        }
        common |= {"rounding_seed": self._rounding_seed(layer), "workspace": workspace_on(q.device)}

        launches = self._launches(visit)
        if len(launches) > 1:
            common["dq_acc"] = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
        for launch in launches:
            with self._resident(visit, launch.pages):
                _C.attention_backward(**common, **launch.arguments)
        self._end_own_pages(layer, dk, dv)
        if pages.check_finite:
            expect_finite("the gradient of attention", dq, dk, dv, chunk=self.chunk, layer=layer)
        return dq, dk, dv

    # Arguments of the kernels ---------------------------------------------------------------------

    def _common(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int,
        selection: torch.Tensor | None,
    ) -> dict[str, Any]:
        pages = self.pages
        begin, end = pages.chunks.span(self.chunk)
        first_key = None
        if pages.first_key is not None:
            first_key = pages.first_key[:, begin:end].contiguous()
        return {
            "q": q,
            "k": k,
            "v": v,
            "scale": scale,
            "page_size": pages.layout.page_size,
            "window": window,
            "first_key": first_key,
            "num_keys": pages.num_keys,
            "kv_pool": pages.manager.pool_address(),
            "kv_slot_bytes": pages.layout.slot_bytes,
            "kv_num_slots": pages.manager.device_slots,
            "block_table": pages.tables[layer],
            "num_past": begin,
            "selection": selection,
            "stream": stream_of(q.device),
        }

    def _gradients(self, layer: int) -> dict[str, Any]:
        pages = self.pages
        return {
            "dkv_pool": pages.manager.pool_address(),
            "dkv_unit_bytes": pages.layout.slot_bytes // 2,
            "dkv_table": pages.gradient_tables[layer],
            "dkv_dtype": str(pages.layout.grad_dtype).removeprefix("torch."),
        }

    def _rounding_seed(self, layer: int) -> int:
        """Mixes (seed, layer, chunk); kernels add the page and the element."""
        mixed = self.pages.rounding_seed ^ (layer << 40) ^ (self.chunk + 1)
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        return (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64

    # Pages ----------------------------------------------------------------------------------------

    def _launches(self, visit: int) -> list[_Launch]:
        """The kernels of a visit: its waves, the chunk's own keys in front of the first.

        They get a launch of their own where pages of that wave have to be fetched first. How a
        visit is parted changes no bit.
        """
        waves = [] if visit < 0 else self.pages.manager.waves(visit)
        parts: list[Wave | None] = list(waves)
        if not waves or self._own_alone(visit, waves[0]):
            parts.insert(0, None)
        return [
            _Launch(part, first=index == 0, last=index == len(parts) - 1)
            for index, part in enumerate(parts)
        ]

    def _own_alone(self, visit: int, wave: Wave) -> bool:
        return self.pages.spilled and self.pages.manager.own_alone(visit, *wave)

    @contextmanager
    def _resident(self, visit: int, wave: Wave | None) -> Iterator[None]:
        """Hold a wave's pages in the device tier while kernels use them."""
        if wave is None:
            yield
            return
        pages = self.pages
        device = pages.tables[0].device
        stream = stream_of(device)
        with_torchs_unused(device, partial(pages.manager.acquire, visit, *wave, stream))
        try:
            yield
        finally:
            pages.manager.release(visit, *wave, stream)

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the chunk's keys and values into new pages."""
        pages = self.pages
        begin, end = pages.chunks.span(self.chunk)
        first = pages.chunks.first_page(self.chunk)
        last = first + -(-(end - begin) // pages.layout.page_size)
        num_rows = None
        if pages.num_keys is not None:
            num_rows = (pages.num_keys - begin).clamp(0, end - begin).to(torch.int32)
        summary = pages.summaries[layer]
        step = pages.manager.max_create(layer)
        stream = stream_of(k.device)
        for page in range(first, last, step):
            stop = min(page + step, last)
            with_torchs_unused(k.device, partial(pages.manager.create, layer, page, stop, stream))
            _C.page_write(
                k=k,
                v=v,
                kv_pool=pages.manager.pool_address(),
                kv_slot_bytes=pages.layout.slot_bytes,
                slots=pages.tables[layer][:, first:last],
                page_begin=page - first,
                page_end=stop - first,
                page_size=pages.layout.page_size,
                num_rows=num_rows,
                summary=None if summary is None else summary[:, first:last],
                stream=stream,
            )
            pages.manager.commit(layer, page, stop, stream)

    def _end_own_pages(self, layer: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add what later chunks left on the chunk's own keys and values; then its pages are dead.

        So are the keys and values of the chunks down to the next one to be swept: nobody reads them
        again.
        """
        pages, chunks, manager = self.pages, self.pages.chunks, self.pages.manager
        stream = stream_of(dk.device)
        first, last = chunks.first_page(self.chunk), chunks.first_page(self.chunk + 1)
        if self.chunk != pages.swept[-1]:
            step = manager.max_gradients(layer)
            for page in range(first, last, step):
                stop = min(page + step, last)
                with_torchs_unused(
                    dk.device, partial(manager.acquire_gradients, layer, page, stop, stream)
                )
                arguments = self._gradients(layer)
                arguments["dkv_table"] = arguments["dkv_table"][:, first:last]
                _C.page_gradient_read(
                    dk=dk,
                    dv=dv,
                    **arguments,
                    page_begin=page - first,
                    page_end=stop - first,
                    page_size=pages.layout.page_size,
                    scale=pages.dkv_factor,
                    stream=stream,
                )
                manager.drop(layer, page, stop, kv=False, grads=True, stream=stream)
        earlier = [chunk for chunk in pages.swept if chunk < self.chunk]
        dead_from = chunks.first_page(earlier[-1]) if earlier else 0
        manager.drop(layer, dead_from, first, kv=True, grads=False, stream=stream)

    # Selection ------------------------------------------------------------------------------------

    def _select(self, layer: int, q: torch.Tensor, window: int) -> None:
        pages = self.pages
        if pages.selector is None or window:
            return
        begin, end = pages.chunks.span(self.chunk)
        summary = pages.summaries[layer]
        assert summary is not None
        first_key = None if pages.first_key is None else pages.first_key[:, begin:end].contiguous()
        is_new = pages.selector.choose(
            layer, self.chunk, q, summary, begin, first_key, pages.num_keys
        )
        if is_new and pages.spilled:
            pages.selector.request(layer, self.chunk)
            self._unannounced.add((layer, self.chunk))

    def _announce(self, layer: int) -> None:
        """Tell the page manager what fill and sweep of this chunk read, once that is known."""
        pages = self.pages
        if (layer, self.chunk) not in self._unannounced:
            return
        self._unannounced.remove((layer, self.chunk))
        assert pages.selector is not None
        listed = pages.selector.pages(layer, self.chunk)
        for table in (pages.order.fill, pages.order.read, pages.order.accumulate):
            visit = int(table[self.chunk, layer])
            if visit >= 0:
                pages.manager.set_visit_pages(visit, listed)

    def _recorded(self, layer: int) -> torch.Tensor | None:
        selector = self.pages.selector
        return None if selector is None else selector.recorded(layer, self.chunk)


def _dense_in_head(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and 0 not in x.stride()


def _like_tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Memory [B, C, H, D] seen as [B, H, C, D]: what projections want, with no copy."""
    batch, heads, tokens, head_dim = x.shape
    return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


# The operation that autograd sees -----------------------------------------------------------------


@torch.library.custom_op("oomb::chunk_attention", mutates_args=())
def chunk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    call: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the active call ``call`` at ``layer`` for its current chunk."""
    return ChunkAttention.active[call].forward(layer, q, k, v, scale, window)


@chunk_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    call: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _like_tokens_first(q), q.new_empty(q.shape[:3], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.scale, ctx.window, ctx.call, ctx.layer = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    attention = ChunkAttention.active[ctx.call]
    grads = attention.backward(
        ctx.layer,
        q,
        k,
        v,
        o,
        lse,
        d_o,
        None if d_lse is None else d_lse.contiguous(),
        ctx.scale,
        ctx.window,
    )
    return *grads, None, None, None, None


chunk_attention.register_autograd(_backward, setup_context=_setup)


def with_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with a sink logit per head, from that without: o · e^lse / (e^lse + e^sink)."""
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
    return o * share[..., None].to(o.dtype)
