"""Attention of one chunk over its own keys and its paged past, and how autograd sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import ClassVar

import torch

from oomb import _C
from oomb.core.border_states import Carry, FillComplete
from oomb.core.call_pages import CallPages, piece_of
from oomb.core.chunk_run import ChunkRun
from oomb.core.kept_outputs import ByTokens
from oomb.core.latent_past import LatentPast
from oomb.core.page_protocol import Launch, OnPages
from oomb.core.past import Past
from oomb.core.stopwatch import Stopwatch
from oomb.errors import Error
from oomb.model.latent import Expansion, Latent
from oomb.model.swap import Swaps
from oomb.ops.launch import workspace_on
from oomb.parallel.heads import HeadShares
from oomb.parallel.partial_attention import WHOLE, PartialAttention, WholeAttention
from oomb.parallel.placement import Placement


class ChunkAttention(Carry):
    """Attention of chunks; one object per call of the engine.

    Args:
        placement: of the parts of a sequence over ranks.

    Attributes:
        head_groups: of each layer; each has pages of its own, as a layer has.
        kept_seconds: of the forward whose outputs are kept.
    """

    _ids: ClassVar = itertools.count()
    active: ClassVar[dict[int, ChunkAttention]] = {}

    def __init__(
        self,
        pages: CallPages,
        placement: Placement = Placement(),  # noqa: B008  # a constant
        head_groups: int = 1,
    ) -> None:
        self.pages = pages
        self.head_groups = head_groups
        self.id = next(self._ids)
        self.kept_seconds = Stopwatch()
        self._expansions: dict[int, Expansion] = {}  # by layer whose pages hold latents
        self._placement = placement
        self._shares: dict[int, HeadShares] = {}  # by layer whose pages ranks divide

    def activated(self) -> Swaps:
        """While active, the operation that autograd sees finds it by its ``id``."""
        return Swaps(lambda swaps: swaps.replace_item(self.active, self.id, self))

    @contextmanager
    def on(self, run: ChunkRun) -> Iterator[None]:
        """Inside, the page lists that are kept of a chunk are on the device."""
        choice = self.pages.choice
        if choice is not None:
            choice.lists.start(run.chunk)
        yield
        if choice is not None:
            choice.lists.finish(run.chunk)

    def vector(
        self,
        layer: int,
        latent: Latent | None,
        dtype: torch.dtype,
        heads: tuple[int, int, int] | None = None,
    ) -> torch.Tensor | None:
        """What pages of a layer hold in place of keys and values, as [B, 1, C, w]; None: these.

        Args:
            heads: whose keys and values are made of them, as of :class:`Expansion`.
        """
        if not self.holds_latents(layer):
            return None
        assert latent is not None  # the check at construction has seen it
        expansion = latent.expansion
        self._expansions[layer] = expansion.of_heads(*heads) if heads else expansion
        return latent.vector(dtype)

    def holds_latents(self, layer: int) -> bool:
        """Whether a layer's pages hold latents."""
        return self.pages.latents[layer] > 0

    def begin(
        self,
        run: ChunkRun,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shares: HeadShares,
    ) -> None:
        """What comes before attention itself: pages of the chunk, and the choice of past pages.

        Args:
            k, v: as pages hold them.
            shares: who holds which heads of the layer.

        Raises:
            FillComplete: in a fill that ends here.
        """
        pages, chunk = self.pages, run.chunk
        if pages.divisions[layer].ranks > 1:
            self._shares[layer] = shares
        if run.phase == "fill":
            pages.write(layer, chunk, self._writing(chunk, layer, k, v))
        ends = run.ends_with == "pages" and layer >= pages.layers.fill_attends
        if pages.choice is not None:
            is_read = not ends or pages.order.read[chunk, layer] >= 0  # now, or in the sweep
            if is_read and pages.choice.lists.wanted(layer, chunk):
                first_key = pages.first_key_of(chunk)
                pages.choice.choose(layer, chunk, q, first_key, pages.num_keys, shares)
                pages.chosen(layer, chunk, pages.moment)
            elif run.phase == "fill" and pages.choice.lists.known(layer, chunk):
                pages.chosen(layer, chunk)  # in an earlier fill of the same call
            if run.phase == "sweep" and chunk == pages.swept[-1]:
                pages.choice.forget_summaries(layer)
        if ends:
            raise FillComplete

    def forward(
        self,
        run: ChunkRun,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float,
        window: int,
        by_tokens: ByTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B, Hq, C, D] and lse [B, Hq, C] of a chunk, after :meth:`begin`.

        What the fill has kept the sweep takes back, once, and computes nothing.

        Args:
            by_tokens: so the output is kept. The sweep gives q, k and v of own tokens then.
        """
        pages, outputs = self.pages, self.pages.outputs
        kept = self.keeps(run.chunk, layer)
        if kept and outputs.loose and run.phase == "sweep":
            return pages.loose.take(run.chunk, layer)
        batch, heads, tokens, _ = q.shape
        if by_tokens is not None:
            heads, tokens = by_tokens.heads, by_tokens.tokens
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        o = like_tokens_first(q)
        lse = torch.empty(batch, heads, tokens, dtype=state_dtype, device=q.device)
        if kept:
            assert (o.nbytes, lse.nbytes) == (outputs.o_bytes[layer], outputs.lse_bytes[layer])

        @contextmanager
        def launching(parts: int) -> Iterator[Callable[[Launch], None]]:
            with (
                self.kept_seconds.running(q.device) if kept else nullcontext(),
                self._over_ranks(layer).forward(q, o, lse) as (queries, part_o, part_lse),
            ):
                yield kernels(parts, queries, part_o, part_lse)
            if by_tokens is not None:
                whole[0] = by_tokens.send(o)

        def kernels(
            parts: int, q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
        ) -> Callable[[Launch], None]:
            chunk, output = (
                self._chunk(run.chunk, layer, q, k, v, scale, softcap, window),
                _C.Output(o=o, lse=lse),
            )
            state, past = None, self._past(run.chunk, layer, k)
            if parts > 1 or past.divides:
                state = _C.SoftmaxState(
                    acc=torch.empty(q.shape, dtype=state_dtype, device=q.device),
                    max=torch.empty_like(lse),
                    sum=torch.empty_like(lse),
                )

            def kernel(launch: Launch) -> None:
                for part in past.parts(launch):
                    _C.attention_forward(
                        chunk=chunk,
                        past=past.shown(part),
                        output=output,
                        wave=part.wave,
                        state=state,
                        workspace=workspace_on(q.device),
                        stream=pages.stream,
                    )

            return kernel

        whole = [o, lse]
        piece = partial(piece_of, whole, pages.layout.slot_bytes)
        pages.attend(run.phase, layer, run.chunk, launching, piece)
        o = whole[0]
        if kept and outputs.loose:
            pages.loose.keep(run.chunk, layer, o, lse)
        return o, lse

    def keeps(self, chunk: int, layer: int) -> bool:
        """Whether the fill keeps an output for the sweep."""
        return bool(self.pages.outputs.kept[chunk, layer])

    def backward(
        self,
        run: ChunkRun,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        scale: float,
        softcap: float,
        window: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of q, k, v and of what pages hold in place of k and v.

        Adds to the gradient pages of the past and ends the chunk's own.

        Args:
            width: of :meth:`vector`; 0: pages hold k and v.
        """
        pages = self.pages
        if not _dense_in_head(d_o):
            d_o = d_o.contiguous()
        dq, dk, dv = (like_tokens_first(x) for x in (q, k, v))

        @contextmanager
        def launching(parts: int) -> Iterator[Callable[[Launch], None]]:
            with self._over_ranks(layer).backward(q, o, lse, d_o, d_lse, dq) as given:
                yield kernels(parts, *given)

        def kernels(
            parts: int,
            q: torch.Tensor,
            o: torch.Tensor,
            lse: torch.Tensor,
            d_o: torch.Tensor,
            d_lse: torch.Tensor | None,
            dq: torch.Tensor,
        ) -> Callable[[Launch], None]:
            chunk, output = (
                self._chunk(run.chunk, layer, q, k, v, scale, softcap, window),
                _C.Output(o=o, lse=lse),
            )
            d_output = _C.Output(o=d_o, lse=d_lse)
            d_chunk = _C.ChunkGradients(dq=dq, dk=dk, dv=dv)
            dq_acc, past = None, self._past(run.chunk, layer, k)
            if parts > 1 or past.divides:
                dq_acc = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
            state = _C.BackwardState(delta=torch.empty_like(lse), dq_acc=dq_acc)

            def kernel(launch: Launch) -> None:
                for part in past.parts(launch):
                    _C.attention_backward(
                        chunk=chunk,
                        past=past.shown(part),
                        output=output,
                        d_output=d_output,
                        d_chunk=d_chunk,
                        state=state,
                        gradients=past.gradients(part),
                        wave=part.wave,
                        deterministic=pages.deterministic,
                        workspace=workspace_on(q.device),
                        stream=pages.stream,
                    )
                    past.added(part)

            return kernel

        left = (dk, dv)  # what later chunks' gradients are added to
        if width:
            batch, _, tokens, _ = k.shape
            first, second = k.new_zeros(2, batch, 1, tokens, width // 2)
            left = first, second
        own = self._reading_gradient(run.chunk, layer, *left)
        pages.accumulate(layer, run.chunk, launching, own)
        if pages.check_finite:
            name, number = "the gradient of attention", layer // self.head_groups
            expect_finite(name, dq, dk, dv, chunk=run.chunk, layer=number)
        return dq, dk, dv, torch.cat(left, -1) if width else None

    def _over_ranks(self, layer: int) -> WholeAttention:
        shares = self._shares.get(layer)
        return WHOLE if shares is None else PartialAttention(self._placement, shares)

    def _past(self, chunk: int, layer: int, k: torch.Tensor) -> Past | LatentPast:
        if not self.holds_latents(layer):
            return Past(self.pages, layer, chunk)
        return LatentPast(self.pages, layer, chunk, self._expansions[layer], k)

    def _writing(self, chunk: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> OnPages:
        """Writes keys and values [B, Hkv, C, D] of a chunk, and what its pages are chosen by."""
        pages = self.pages
        begin, end = pages.chunks.span(chunk)
        first, last = pages.layers.chunks[layer].pages(chunk)
        num_rows = None
        if pages.num_keys is not None:
            num_rows = (pages.num_keys - begin).clamp(0, end - begin).to(torch.int32)
        page_size, means = pages.layout.page_size_of(layer), None
        if pages.choice is not None:
            means = pages.choice.summarize(layer, chunk, k, page_size, num_rows)

        def write(page_begin: int, page_end: int) -> None:
            _C.page_write(
                k=k,
                v=v,
                pool=pages.pool,
                slots=pages.tables[layer][:, first:last],
                page_begin=page_begin,
                page_end=page_end,
                page_size=page_size,
                num_rows=num_rows,
                summary=means,
                stream=pages.stream,
            )

        return write

    def _reading_gradient(
        self, chunk: int, layer: int, dk: torch.Tensor, dv: torch.Tensor
    ) -> OnPages:
        """Adds what later chunks left on a chunk's own keys and values.

        Gradients of latents have the factor already: that of weights came with them.
        """
        pages = self.pages
        scale = 1.0 if self.holds_latents(layer) else pages.dkv_factor

        def read(page_begin: int, page_end: int) -> None:
            _C.page_gradient_read(
                dk=dk,
                dv=dv,
                gradients=pages.own_gradients(layer, chunk),
                page_begin=page_begin,
                page_end=page_end,
                page_size=pages.layout.page_size_of(layer),
                scale=scale,
                stream=pages.stream,
            )

        return read

    def _chunk(
        self,
        chunk: int,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float,
        window: int,
    ) -> _C.Chunk:
        visibility = self.pages.visibility(layer, chunk, window)
        return _C.Chunk(q=q, k=k, v=v, scale=scale, cap=softcap, visibility=visibility)


def _dense_in_head(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and 0 not in x.stride()


def like_tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Memory [B, C, H, D] seen as [B, H, C, D]: what projections want, with no copy."""
    batch, heads, tokens, head_dim = x.shape
    return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


def expect_finite(what: str, *tensors: torch.Tensor, chunk: int, layer: int | None = None) -> None:
    """Raise unless every element is finite (``Config.check_finite``). Synchronises with a GPU.

    Raises:
        Error: the text names ``what``, the chunk and the layer.
    """
    if all(bool(tensor.isfinite().all()) for tensor in tensors):
        return
    where = f"chunk {chunk}" if layer is None else f"chunk {chunk}, layer {layer}"
    raise Error(f"{where}: {what} is not finite")
