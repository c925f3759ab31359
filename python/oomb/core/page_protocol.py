"""What a layer of a chunk asks of the page manager, and in which order.

The engine and the plan's dry run both drive a :class:`PageProtocol`; they differ in what stands for
the kernels (▸), which is nothing in a dry run:

    begin       begin_call, create_gradients
    write       create ▸ commit                              as many pages at a time as there is
    attend      set_visit_pages, waves, own_alone,           room for
                acquire ▸ release                            wave by wave
                write_output                                 of an output that the fill keeps
                or waves, read_output                        of one that the sweep takes back
    keep_mlp    write_output                                 of what the MLP gave in the fill
    take_mlp    waves, read_output                           in the sweep
    accumulate  create_gradients, waves, own_alone,
                acquire ▸ release                            wave by wave
                acquire_gradients ▸ drop                     of the chunk's own gradient
                drop                                         of keys and values that nobody reads
    end_call    by whoever has begun
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from oomb import _C
from oomb.core.chunk_run import Phase
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import READ_OUTPUT, Chunks, GradientReach, Order, PagedLayers

Wave = tuple[int, int]  # logical pages [begin, end)

OnPages = Callable[[int, int], None]
"""A kernel over a chunk's own pages [begin, end), the chunk's first being 0."""

Piece = Callable[[int, int, int], tuple[int, int]]
"""Address and bytes of pieces [begin, end) of o (0) or of the log-sum-exp (1), or of what the MLP
gave (0)."""


class Arrival(Protocol):
    """When page lists are there for the host to read."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Launch:
    """One kernel of a chunk and layer: pages of a wave; the first has the own chunk too.

    A kernel numbers pages from the start of the chunk's own past, which may be in ranges:

        pages of the call   0 1 2 3 | 4 5 6 | 7 8       a branch behind 0 … 3 begins at 7
        as its kernel sees  0 1 2 3         | 4 5       so it is shown the table from entry 3 on

    Attributes:
        pages: None: of none.
        shift: by which pages of the call are numbered higher.
    """

    pages: Wave | None
    shift: int
    first: bool
    last: bool

    @property
    def wave(self) -> _C.Wave:
        begin, end = self.pages or (self.shift, self.shift)
        return _C.Wave(
            begin=begin - self.shift, end=end - self.shift, first=self.first, last=self.last
        )


Launching = Callable[[int], AbstractContextManager[Callable[[Launch], None]]]
"""Makes the kernel of a visit of that many launches; it is called inside the context."""


@dataclass(frozen=True, kw_only=True)
class PageProtocol:
    """The pages of one call, as the page manager is asked for them.

    Attributes:
        swept: chunks that receive gradient, ascending.
        reach: chunks that have gradient pages.
        outputs: that the fill keeps for the sweep.
        spilled: the device tier cannot hold the whole call.
        filled: chunks whose keys and values are written to pages.
        lists: distinct pages, of all sequences, that a layer of a chunk has chosen.
        begun: of each layer, chunks of the fill whose keys and values it has taken.
        extended: (layer, chunk) whose gradient pages came in the sweep.
        unannounced: layers and chunks whose lists are new, oldest first, and when they are there.
    """

    manager: _C.PageManager
    chunks: Chunks
    order: Order
    outputs: KeptOutputs
    layers: PagedLayers
    swept: Sequence[int]
    reach: GradientReach
    spilled: bool
    filled: int
    lists: Callable[[int, int], npt.NDArray[np.int64]]
    unannounced: dict[tuple[int, int], Arrival | None] = field(default_factory=dict)
    extended: set[tuple[int, int]] = field(default_factory=set)
    begun: Counter[int] = field(default_factory=Counter)

    @property
    def stream(self) -> int:
        """Handle of the stream that kernels run in."""
        return 0

    def growing(self, step: Callable[[], None]) -> None:
        """Take a step of the manager for which the device tier may have to grow."""
        step()

    def begin(
        self,
        *,
        pages_per_sequence: list[int],
        grad_slots: int,
        exact: bool,
        wave_pages: int,
        device_slots: int | None = None,
    ) -> None:
        """Arguments as of ``_C.PageManager.begin_call``."""
        self.manager.begin_call(
            num_layers=self.layers.number,
            pages_per_sequence=pages_per_sequence,
            grad_slots=grad_slots,
            visits=self.order.visits,
            exact=exact,
            wave_pages=wave_pages,
            device_slots=device_slots,
            outputs=self.outputs.pieces_of_layer,
        )
        for layer in self.layers.storing:
            for chunk in self.reach.at_start:
                self.manager.create_gradients(layer, *self.layers.pages(layer, chunk))

    def early(self, layer: int, chunk: int) -> bool:
        """Whether a chunk of the fill is at a layer before the chunk that it sees."""
        return self.begun[layer] < chunk

    def write(self, layer: int, chunk: int, kernel: OnPages) -> None:
        """Make the pages of a chunk's keys and values in the fill, if a later chunk reads them."""
        assert self.begun[layer] == chunk  # else a choice would miss pages of its past
        self.begun[layer] += 1
        if chunk >= self.filled or not self.layers.stores(layer):
            return
        own = self.layers.chunks[layer].first_page(chunk)
        for page, stop in _steps(*self.layers.pages(layer, chunk), self.manager.max_create()):
            self.growing(partial(self.manager.create, layer, page, stop, self.stream))
            kernel(page - own, stop - own)
            self.manager.commit(layer, page, stop, self.stream)

    def chosen(
        self, layer: int, chunk: int, arrival: Callable[[], Arrival | None] = lambda: None
    ) -> None:
        """There are lists of what a chunk reads; the manager is told if pages move.

        Args:
            arrival: says when they are there for the host to read; None: now.
        """
        if self.spilled:
            self.unannounced[layer, chunk] = arrival()

    def attend(
        self, phase: Phase, layer: int, chunk: int, launching: Launching, piece: Piece
    ) -> None:
        """Forward of a chunk over its past; or, of an output that was kept, no forward."""
        self._announce(layer, chunk)
        kept = bool(self.outputs.kept[chunk, layer]) and not self.outputs.loose
        if phase == "sweep" and kept:
            visit = int(self.order.read[chunk, layer])
            self._take(visit, self.outputs.parts(chunk, layer), piece)
            return
        table = self.order.fill if phase == "fill" else self.order.read
        self._visit(layer, chunk, int(table[chunk, layer]), launching)
        if kept:
            self._keep(layer, self.outputs.parts(chunk, layer), piece)

    def keep_mlp(self, layer: int, chunk: int, piece: Piece) -> None:
        """Copy what the MLP gave in the fill, where :meth:`KeptOutputs.mlp_span` has pieces."""
        span = self.outputs.mlp_span(chunk, layer)
        assert span is not None
        self._keep(layer, [span], piece)

    def take_mlp(self, layer: int, chunk: int, piece: Piece) -> None:
        """Copy it back in the sweep."""
        span = self.outputs.mlp_span(chunk, layer)
        assert span is not None
        self._take(int(self.order.mlp[chunk, layer]), [span], piece)

    def accumulate(self, layer: int, chunk: int, launching: Launching, own: OnPages) -> None:
        """Backward of a chunk over its past, then the end of its own pages.

        Layers that read another one's pages add to its gradients before it does. They have no own.

        Args:
            own: adds what later chunks left on pages of the chunk's own keys and values.
        """
        source, added = self.layers.sources[layer], self.reach.added(chunk)
        if added is not None and (source, added) not in self.extended:  # the first to reach it
            self.extended.add((source, added))
            if source != layer and chunk + 1 != self.swept[-1]:
                # Nobody ended it where the source is frozen: it has no backward then.
                first, last = self.layers.pages(source, chunk + 1)
                self.manager.drop(source, first, last, kv=False, grads=True, stream=self.stream)
            self.manager.create_gradients(source, *self.layers.pages(source, added))
        self._visit(layer, chunk, int(self.order.accumulate[chunk, layer]), launching)
        if source == layer:
            self._end(layer, chunk, own)

    def _end(self, layer: int, chunk: int, own: OnPages) -> None:
        """The chunk's gradient is read; then its pages are dead."""
        chunks = self.layers.chunks[layer]
        first, ours = chunks.first_page(chunk), self.layers.pages(layer, chunk)
        if chunk != self.swept[-1]:
            for page, stop in _steps(*ours, self.manager.max_gradients()):
                self.growing(
                    partial(self.manager.acquire_gradients, layer, page, stop, self.stream)
                )
                own(page - first, stop - first)
                self.manager.drop(layer, page, stop, kv=False, grads=True, stream=self.stream)
        # Nobody reads the chunks down to the next one to be swept again.
        place = bisect_left(self.swept, chunk)
        dead_from = chunks.first_page(self.swept[place - 1]) if place else 0
        self.manager.drop(layer, dead_from, first, kv=True, grads=False, stream=self.stream)

    def own_alone(self, visit: int, wave: Wave) -> bool:
        """Whether a chunk's own keys get a launch of their own before a wave."""
        return self.spilled and self.manager.own_alone(visit, *wave)

    def _visit(self, layer: int, chunk: int, visit: int, launching: Launching) -> None:
        """Launch over the waves of a chunk's past, the chunk's own keys in front of the first.

        They get a launch of their own where pages of that wave have to be fetched first. How a
        visit is parted changes no bit.

        Args:
            visit: first row of the call's order; negative: no past is read.
        """
        ranges = [] if visit < 0 else self._ranges(layer, chunk, visit)
        waves = [(row, shift, wave) for row, shift in ranges for wave in self.manager.waves(row)]
        parts: list[tuple[int, int, Wave | None]] = list(waves)
        if not waves or self.own_alone(waves[0][0], waves[0][2]):
            parts.insert(0, (visit, 0, None))
        last = len(parts) - 1
        with launching(len(parts)) as kernel:
            for index, (row, shift, wave) in enumerate(parts):
                with self._resident(row, wave):
                    kernel(Launch(wave, shift, first=index == 0, last=index == last))

    def _ranges(self, layer: int, chunk: int, visit: int) -> list[tuple[int, int]]:
        """Of each range of a chunk's past, its row of the order and the shift of its pages."""
        ranges, seen = [], 0
        for row, (first, last) in enumerate(self.layers.chunks[layer].past(chunk), visit):
            ranges.append((row, first - seen))
            seen += last - first
        return ranges

    @contextmanager
    def _resident(self, visit: int, wave: Wave | None) -> Iterator[None]:
        """Hold a wave's pages in the device tier while kernels use them."""
        if wave is None:
            yield
            return
        stream = self.stream
        self.growing(partial(self.manager.acquire, visit, *wave, stream))
        try:
            yield
        finally:
            self.manager.release(visit, *wave, stream)

    def _keep(self, layer: int, parts: Sequence[tuple[int, int]], piece: Piece) -> None:
        """Copy an output into pages that the sweep will read."""
        for part, (first, last) in enumerate(parts):
            for begin, end in _steps(first, last, self.manager.max_outputs()):
                source, num_bytes = piece(part, begin - first, end - first)
                self.growing(
                    partial(
                        self.manager.write_output,
                        layer=layer,
                        begin=begin,
                        end=end,
                        source=source,
                        num_bytes=num_bytes,
                        stream=self.stream,
                    )
                )

    def _take(self, visit: int, parts: Sequence[tuple[int, int]], piece: Piece) -> None:
        """Copy a kept output back; its pages are dead then."""
        waves = self.manager.waves(visit)
        for part, (first, last) in enumerate(parts):
            for wave_begin, wave_end in waves:
                begin, end = max(first, wave_begin), min(last, wave_end)
                if begin >= end:
                    continue
                target, num_bytes = piece(part, begin - first, end - first)
                self.growing(
                    partial(
                        self.manager.read_output,
                        visit=visit,
                        begin=begin,
                        end=end,
                        target=target,
                        num_bytes=num_bytes,
                        stream=self.stream,
                    )
                )

    def _announce(self, layer: int, chunk: int) -> None:
        """Tell the manager what a chunk reads, if that is new, and those that chose before it.

        The host waits until the lists are there, so this comes where the pages are needed at once.
        """
        oldest = None
        while (layer, chunk) in self.unannounced and oldest != (layer, chunk):
            oldest, arrival = next(iter(self.unannounced.items()))
            del self.unannounced[oldest]
            if arrival is not None:
                arrival.synchronize()
            self._tell(*oldest)

    def _tell(self, layer: int, chunk: int) -> None:
        chosen, order = self._by_range(self.lists(layer, chunk), chunk), self.order
        for table in (order.fill, order.read, order.accumulate):
            visit = int(table[chunk, layer])
            if visit >= 0 and order.visits[visit, 1] != READ_OUTPUT:
                for row, pages in enumerate(chosen, visit):
                    self.manager.set_visit_pages(row, pages)

    def _by_range(self, chosen: npt.NDArray[np.int64], chunk: int) -> list[npt.NDArray[np.int64]]:
        """Chosen pages of a chunk's past as pages of the call, for each range that it is in.

        A past in several ranges is that of a single sequence."""
        ranges = self.chunks.past(chunk)
        if len(ranges) == 1 and ranges[0][0] == 0:
            return [chosen]
        found, seen = [], 0
        for first, last in ranges:
            inside = (seen <= chosen) & (chosen < seen + last - first)
            found.append(chosen[inside] + (first - seen))
            seen += last - first
        return found


def _steps(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Pages [first, last) in ranges of at most ``step``."""
    for page in range(first, last, step):
        yield page, min(page + step, last)
