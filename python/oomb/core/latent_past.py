"""The past of a layer whose pages hold latents: expanded a stretch at a time, forward and back.

    pages       [ latent | rotated key ]   576 numbers of a token, say
        ▼ gathered                                   ▲ added, in the pages' precision
      stretch ──▶ module.expand_kv ──▶ scratch K, V ──▶ kernel ──▶ scratch dK, dV ──▶ its backward
                                                                   which also leaves the gradients
                                                                   of the module's weights

A stretch is a part of a wave, so small that scratch is bounded. Its tokens are expanded in groups
of pages that no wave parts, so that a product's size, and with it the rounding, is the same however
the past is cut into waves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oomb import _C
from oomb.core.call_pages import CallPages, seed_of_chunk
from oomb.core.latent_groups import expanded, gathered, half_of, pages_at_once, propagated
from oomb.core.page_protocol import Launch
from oomb.core.pool_memory import rows_at
from oomb.core.rounded_sums import add_rounded, seed_of_addition
from oomb.model.latent import Expansion


class LatentPast:
    """As of :class:`oomb.core.past.Past`; one object for one visit.

    Args:
        k: [B, H, C, D] keys of the chunk, whose shape and dtype the past's have.
    """

    divides = True

    def __init__(
        self, pages: CallPages, layer: int, chunk: int, expansion: Expansion, k: torch.Tensor
    ) -> None:
        self._pages, self._layer, self._chunk = pages, layer, chunk
        self._expansion, self._like = expansion, k
        self._page_size = pages.layout.page_size_of(layer)
        batch, heads, _, width = k.shape
        self._group = pages.wave_pages
        self._step = pages_at_once(batch, self._group, self._page_size)
        most = min(self._step, pages.layers.chunks[layer].past_pages(chunk))
        slots = max(1, batch * most)
        self._scratch = k.new_empty(slots, 2, heads, self._page_size, width)
        self._d_scratch: torch.Tensor | None = None
        self._vectors = k.new_empty(0)  # of the part that was shown last

    def parts(self, launch: Launch) -> Iterator[Launch]:
        if launch.pages is None:
            yield launch
            return
        begin, end = launch.pages
        first = begin
        while first < end:
            stop = min(end, (first // self._step + 1) * self._step)
            yield Launch(
                (first, stop),
                launch.shift,
                first=launch.first and first == begin,
                last=launch.last and stop == end,
            )
            first = stop

    def shown(self, part: Launch) -> _C.PastPages:
        pages, size = self._pages, self._page_size
        stored = pages.tables[self._layer][:, part.shift :]
        table = torch.full_like(stored, -1)
        begin, end = part.wave.begin, part.wave.end
        if begin < end:
            own = stored[:, begin:end]
            table[:, begin:end] = self._places(own)
            self._vectors = self._like.new_empty(0)  # room for the next ones
            self._vectors = self._gathered(own)
        for first, last in self._groups(part):
            self._expand(first, last, table[:, begin + first : begin + last])
        return _C.PastPages(
            page_size=size,
            pool=_pool_of(self._scratch, 1),
            block_table=table,
            num_tokens=pages.chunks.past_tokens(self._chunk),
            selection=None,
        )

    def gradients(self, part: Launch) -> _C.GradientPages:
        wide = torch.float64 if self._like.dtype == torch.float64 else torch.float32
        if self._d_scratch is None:
            self._d_scratch = torch.empty_like(self._scratch, dtype=wide)
        self._d_scratch.zero_()
        wanted = self._pages.gradient_tables[self._layer][:, part.shift :]
        table = torch.full_like(wanted, -1)
        begin, end = part.wave.begin, part.wave.end
        if begin < end:
            places = self._places(wanted[:, begin:end, 0])
            table[:, begin:end, 0] = torch.where(places < 0, places, 2 * places)
            table[:, begin:end, 1] = torch.where(places < 0, places, 2 * places + 1)
        dtype = str(wide).removeprefix("torch.")
        return _C.GradientPages(
            pool=_pool_of(self._d_scratch, 2), table=table, dtype=dtype, rounding_seed=0
        )

    def added(self, part: Launch) -> None:
        """Propagates what the kernel left in scratch back through the expansion."""
        if part.pages is None:
            return
        assert self._d_scratch is not None
        size, batch = self._page_size, self._like.shape[0]
        begin, number = part.wave.begin, part.wave.end - part.wave.begin
        by_page = self._d_scratch[: batch * number].unflatten(0, (batch, number))
        table = self._pages.gradient_tables[self._layer][:, part.shift :]
        for first, last in self._groups(part):
            place = begin + part.shift + first
            self._add(
                table[:, begin + first : begin + last],
                propagated(
                    self._expansion,
                    self._vectors[:, :, first * size : last * size],
                    by_page[:, first:last],
                    self._pages.dkv_factor,
                ),
                place,
            )

    def _expand(self, first: int, last: int, slots: torch.Tensor) -> None:
        """Keys and values of pages [first, last) of a part go to slots [B, n] of scratch."""
        size = self._page_size
        vectors = self._vectors[:, :, first * size : last * size]
        k, v = expanded(self._expansion, vectors, self._like.shape[-1])
        _C.page_write(
            k=k,
            v=v,
            pool=_pool_of(self._scratch, 1),
            slots=slots,
            page_begin=0,
            page_end=last - first,
            page_size=size,
            num_rows=None,
            summary=None,
            stream=self._pages.stream,
        )

    def _groups(self, part: Launch) -> Iterator[tuple[int, int]]:
        """Pages [first, last) of a part that are expanded together, its first being 0."""
        if part.pages is None:
            return
        begin, end = part.pages
        first = begin
        while first < end:
            last = min(end, (first // self._group + 1) * self._group)
            yield first - begin, last - begin
            first = last

    def _places(self, slots: torch.Tensor) -> torch.Tensor:
        """Of pages [B, n] their slots in scratch; -1 where ``slots`` has none."""
        numbers = torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device)
        return torch.where(slots < 0, -1, numbers.view(slots.shape))

    def _gathered(self, slots: torch.Tensor) -> torch.Tensor:
        """Vectors [B, 1, n * P, w] of pages in slots [B, n]; zeros where there is no page."""
        pages = self._pages
        rows = rows_at(
            pages.manager.pool_address(),
            pages.manager.device_slots,
            pages.layout.slot_bytes,
            self._like.dtype,
            pages.device,
        )
        return gathered(rows, slots, self._expansion, self._page_size)

    def _add(self, entries: torch.Tensor, d_vectors: torch.Tensor, page: int) -> None:
        """Add to the gradient pages of a group.

        Args:
            entries: [B, n, 2], units of half a slot as kernels have them; -1: not wanted.
            d_vectors: [B, 1, n * P, w].
            page: of the call, the group's first.
        """
        pages, half = self._pages, half_of(self._expansion, self._page_size)
        dtype = pages.layout.grad_dtype
        apart = pages.layout.grad_slots > 1  # each half has a slot, of two units
        slots, slot_bytes = pages.manager.device_slots, pages.layout.slot_bytes
        rows = rows_at(
            pages.manager.pool_address(),
            slots if apart else 2 * slots,
            slot_bytes if apart else slot_bytes // 2,
            dtype,
            pages.device,
        )[:, :half]
        d_vectors = torch.nn.functional.pad(d_vectors[:, 0], (0, d_vectors.shape[-1] % 2))
        batch, number = entries.shape[:2]
        halves = d_vectors.view(batch, number, self._page_size, 2, -1).transpose(2, 3)
        addend, places = halves.reshape(-1, half), entries.reshape(-1).long()
        if not pages.every_gradient:
            wanted = places >= 0
            addend, places = addend[wanted], places[wanted]
        if apart:
            places = places // 2
        sums = rows[places]
        if dtype == torch.bfloat16:
            seed = seed_of_chunk(pages.rounding_seed, self._layer, self._chunk)
            add_rounded(sums, addend.float(), seed_of_addition(seed, page))
        else:
            sums += addend
        rows.index_copy_(0, places, sums)


def _pool_of(scratch: torch.Tensor, units: int) -> _C.PagePool:
    """Scratch pages [slots, 2, …] as kernels find them, in so many units a slot."""
    return _C.PagePool(
        address=scratch.data_ptr(),
        slot_bytes=scratch[0].numel() * scratch.element_size() // units,
        num_slots=units * scratch.shape[0],
    )
