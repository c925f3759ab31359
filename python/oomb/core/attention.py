"""Attention of one chunk over its own keys and its paged past."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from oomb import _C
from oomb.core.call_pages import CallPages
from oomb.core.carry import FillComplete
from oomb.core.finite import expect_finite
from oomb.core.output_pages import keep_output, take_output
from oomb.core.own_pages import end_own, extend_gradients, gradient_arguments, write_own
from oomb.core.rounding import seed_of_chunk
from oomb.core.stopwatch import Stopwatch
from oomb.core.waves import launches, resident
from oomb.model.swap import Swaps
from oomb.ops.launch import workspace_on


class ChunkAttention:
    """Attention of the chunk that is being run; one object per call of the engine.

    Attributes:
        stop_at_last: the fill ends at the last layer's keys and values.
        kept_seconds: of the forward whose outputs are kept.
        begun: of each layer, chunks of the fill whose keys and values it has taken.
    """

    _ids: ClassVar = itertools.count()
    active: ClassVar[dict[int, ChunkAttention]] = {}

    def __init__(self, pages: CallPages) -> None:
        self.pages = pages
        self.id = next(self._ids)
        self.chunk = 0
        self.phase = "fill"
        self.stop_at_last = False
        self.kept_seconds = Stopwatch()
        self.begun: Counter[int] = Counter()

    def activated(self) -> Swaps:
        """While active, the operation that autograd sees finds it by its ``id``."""
        return Swaps(lambda swaps: swaps.replace_item(self.active, self.id, self))

    @contextmanager
    def on(self, chunk: int) -> Iterator[None]:
        """Inside, it is ``chunk`` that is run; its kept page lists are on the device."""
        self.chunk, choice = chunk, self.pages.choice
        if choice is not None:
            choice.lists.start(chunk)
        yield
        if choice is not None:
            choice.lists.finish(chunk)

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """None: attention's backward takes what later chunks left on its keys and values."""
        return [], []

    def begin(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """What comes before attention itself: pages of the chunk, and the choice of past pages.

        Raises:
            FillComplete: in a fill that ends here.
        """
        pages, chunk = self.pages, self.chunk
        if self.phase == "fill":
            assert self.begun[layer] == chunk  # else a choice would miss pages of its past
            self.begun[layer] += 1
            if chunk < pages.filled:
                write_own(pages, layer, chunk, k, v)
        ends = self.phase == "fill" and self.stop_at_last and layer == pages.num_layers - 1
        if pages.choice is not None:
            is_read = not ends or pages.order.read[chunk, layer] >= 0  # now, or in the sweep
            if is_read and pages.choice.lists.wanted(layer, chunk):
                first_key = pages.first_key_of(chunk)
                pages.choice.choose(layer, chunk, q, first_key, pages.num_keys)
            elif self.phase == "fill":
                pages.choice.recall(layer, chunk)
            if self.phase == "sweep" and chunk == pages.swept[-1]:
                pages.choice.forget_summaries(layer)
        if ends:
            raise FillComplete

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B, Hq, C, D] and lse [B, Hq, C] of the current chunk, after :meth:`begin`.

        What the fill has kept the sweep takes back, once, and computes nothing.
        """
        pages, order = self.pages, self.pages.order
        visit = int((order.fill if self.phase == "fill" else order.read)[self.chunk, layer])
        if pages.choice is not None:
            pages.choice.announce(layer, self.chunk)
        batch, heads, tokens, head_dim = q.shape
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        o = like_tokens_first(q)
        lse = torch.empty(batch, heads, tokens, dtype=state_dtype, device=q.device)
        kept = bool(pages.outputs.kept[self.chunk, layer])
        if kept and self.phase == "sweep":
            take_output(pages, layer, self.chunk, o, lse)
            return o, lse
        common = self._common(layer, q, k, v, scale, window)
        common["workspace"] = workspace_on(q.device)

        parts = launches(pages, visit)
        if len(parts) > 1:
            common["acc"] = torch.empty(
                batch, heads, tokens, head_dim, dtype=state_dtype, device=q.device
            )
            common["max"] = torch.empty_like(lse)
            common["sum"] = torch.empty_like(lse)
        with self.kept_seconds.running(q.device) if kept else nullcontext():
            for part in parts:
                with resident(pages, visit, part.pages):
                    _C.attention_forward(**common, **part.arguments, o=o, lse=lse)
        if kept:
            keep_output(pages, layer, self.chunk, o, lse)
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
        extend_gradients(pages, layer, self.chunk)
        if not _dense_in_head(d_o):
            d_o = d_o.contiguous()
        dq, dk, dv = (like_tokens_first(x) for x in (q, k, v))
        common = self._common(layer, q, k, v, scale, window)
        common |= gradient_arguments(pages, layer)
        common |= {"o": o, "d_o": d_o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "d_lse": d_lse}
        common |= {
            "delta": torch.empty_like(lse),
            "deterministic": pages.deterministic,
            "rounding_seed": seed_of_chunk(pages.rounding_seed, layer, self.chunk),
            "workspace": workspace_on(q.device),
        }

        parts = launches(pages, visit)
        if len(parts) > 1:
            common["dq_acc"] = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
        for part in parts:
            with resident(pages, visit, part.pages):
                _C.attention_backward(**common, **part.arguments)
        end_own(pages, layer, self.chunk, dk, dv)
        if pages.check_finite:
            expect_finite("the gradient of attention", dq, dk, dv, chunk=self.chunk, layer=layer)
        return dq, dk, dv

    def _common(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int,
    ) -> dict[str, Any]:
        """Arguments that both kernels take."""
        pages, choice = self.pages, self.pages.choice
        begin, _ = pages.chunks.span(self.chunk)
        return {
            "q": q,
            "k": k,
            "v": v,
            "scale": scale,
            "page_size": pages.layout.page_size,
            "window": window,
            "first_key": pages.first_key_of(self.chunk),
            "num_keys": pages.num_keys,
            "kv_pool": pages.manager.pool_address(),
            "kv_slot_bytes": pages.layout.slot_bytes,
            "kv_num_slots": pages.manager.device_slots,
            "block_table": pages.tables[layer],
            "num_past": begin,
            "selection": None if choice is None else choice.lists.on_device(layer, self.chunk),
            "stream": pages.stream,
        }


def _dense_in_head(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and 0 not in x.stride()


def like_tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Memory [B, C, H, D] seen as [B, H, C, D]: what projections want, with no copy."""
    batch, heads, tokens, head_dim = x.shape
    return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
