"""The page manager run through a call on pages that hold nothing, by the engine's protocol."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from oomb import _C
from oomb.core.alternation import Alternation
from oomb.core.chunk_run import Phase as CallPhase
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import Order, PagedLayers, call_order, seen_past
from oomb.core.page_protocol import Launch, Launching, PageProtocol
from oomb.core.tiers import Caps
from oomb.core.window_pages import most_of_chunk
from oomb.model.layer_shape import LayerShape
from oomb.plan.pages import PageCall
from oomb.plan.timeline import Phase, Visit

# Longer calls run with coarser pages, and with some of their layers.
_PAGE_VISITS = 1_000_000
_VISITS = 4_000
_PATIENCE = 8  # times as many page visits, where coarser pages would not fit a layer's windows
_SLACK = 1.0  # of host memory


@dataclass(frozen=True, kw_only=True)
class DryRunResult:
    """Peak of the host tier and copies, in bytes.

    Attributes:
        visits: in order; each stands for ``layers_each`` layers.
    """

    host_peak_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    visits: tuple[Visit, ...]
    layers_each: float


class DryRun:
    """What the engine asks of its page manager in a call, in the same order."""

    def __init__(self, call: PageCall, caps: Caps) -> None:
        self._shapes = _some_layers(call)
        self._layers_each = len(call.shapes) / len(self._shapes)
        self._factor = factor = _coarseness(call, self._shapes)
        self._call = call
        spilled = caps.host_slots > 0
        self._paired = spilled and call.selection is not None
        self._chunks = replace(call.chunks, page_size=call.chunks.page_size * factor)
        self._layers = self._coarser_layers()
        self._slot_bytes = round(call.layout.slot_bytes * factor * self._layers_each)
        self._outputs = self._scaled_outputs()
        scale = factor * self._layers_each
        self._pages = PageProtocol(
            manager=_C.PageManager(
                device="cpu",
                dry=True,
                slot_bytes=self._slot_bytes,
                device_slots=max(round(caps.device_slots / scale), call.smallest_slots),
                host_slots=round(caps.host_capacity * self._excess() / scale),
            ),
            chunks=self._chunks,
            order=self._make_order(),
            outputs=self._outputs,
            layers=self._layers,
            swept=call.swept,
            reach=call.reach,
            spilled=spilled,
            filled=call.filled,
            lists=self._guess,
        )
        self._timeline: list[Visit] = []
        self._chose: set[tuple[int, int]] = set()  # (layer, chunk)
        self._random = np.random.default_rng(0)

    def _make_order(self) -> Order:
        call = self._call
        return call_order(
            self._layers,
            call.filled,
            call.swept,
            whole_fill=False,
            paired=self._paired,
            output_span=self._outputs.span,
            mlp_span=self._outputs.mlp_span,
        )

    def _coarser_layers(self) -> PagedLayers:
        """Those that are run, with pages that stand for several."""
        layers = replace(self._call, shapes=self._shapes).layers
        coarse = [replace(c, page_size=c.page_size * self._factor) for c in layers.chunks]
        return replace(layers, chunks=tuple(coarse))

    def _excess(self) -> float:
        """Times as much host memory as a real call: with few layers more has to move at once than
        there, and of windows coarse pages hold more than is kept."""
        if self._factor * self._layers_each == 1:
            return 1.0
        coarse = zip(self._layers.chunks, self._layers.widest, strict=True)
        real = self._call.layers
        finest = list(zip(real.chunks, real.widest, strict=True))[: len(self._shapes)]
        pages = self._factor * sum(most_of_chunk(*layer) for layer in coarse)
        return (1 + _SLACK) * max(1.0, pages / max(1, sum(most_of_chunk(*x) for x in finest)))

    @property
    def _most_pages(self) -> int:
        """Pages of a sequence in the layer that has most."""
        return max(chunks.first_page(self._call.filled) for chunks in self._layers.chunks)

    def _scaled_outputs(self) -> KeptOutputs:
        """Outputs of the layers that are run, each of which stands for several."""
        outputs, each = self._call.outputs or self._call.nothing_kept, self._layers_each
        layers = len(self._shapes)
        may = np.arange(layers) < self._layers.fill_attends  # where the fill ends
        kept_mlp = None if outputs.kept_mlp is None else outputs.kept_mlp[:, :layers]
        return replace(
            outputs,
            kept=outputs.kept[:, :layers] & may,
            slot_bytes=self._slot_bytes,
            o_bytes=tuple(round(size * each) for size in outputs.o_bytes[:layers]),
            lse_bytes=tuple(round(size * each) for size in outputs.lse_bytes[:layers]),
            kept_mlp=None if kept_mlp is None else kept_mlp & may,
            mlp_bytes=tuple(round(size * each) for size in outputs.mlp_bytes[:layers]),
        )

    def run(self) -> DryRunResult:
        """Runs the call; once per object."""
        call, manager = self._call, self._pages.manager
        try:
            self._pages.begin(
                pages_per_sequence=[self._most_pages] * call.batch,
                grad_slots=call.layout.grad_slots,
                exact=call.selection is None,
                wave_pages=max(1, call.wave_pages // self._factor),
            )
            self._fill()
            self._sweep()
            stats = manager.stats()
        finally:
            manager.end_call()
            manager.close()
        return DryRunResult(
            host_peak_bytes=stats.host_peak_bytes,
            h2d_bytes=stats.h2d_bytes,
            d2h_bytes=stats.d2h_bytes,
            visits=tuple(self._timeline),
            layers_each=self._layers_each,
        )

    def _fill(self) -> None:
        if self._paired:
            turns = Alternation()
            turns.run(lambda: self._fill_chunks(0, turns), lambda: self._fill_chunks(1, turns))
        else:
            self._fill_chunks(0, None)

    def _fill_chunks(self, first: int, turns: Alternation | None) -> None:
        """All chunks from ``first``, or every other; while one attends, the other's pages come."""
        for chunk in range(first, self._call.filled, 1 if turns is None else 2):
            for layer in range(len(self._shapes)):
                while turns is not None and self._pages.early(layer, chunk):
                    turns.pass_on()
                self._begin("fill", chunk, layer)
                if layer == self._layers.last_filled:
                    break  # the fill ends here
                if layer >= self._layers.fill_attends:
                    continue  # other groups of the same heads are left to write
                if turns is not None:
                    turns.pass_on()
                self._attend("fill", chunk, layer)

    def _sweep(self) -> None:
        layers = range(len(self._shapes))
        for chunk in reversed(self._call.swept):
            for layer in layers:
                self._begin("sweep", chunk, layer)
                self._attend("sweep", chunk, layer)
            for layer in reversed(layers):
                visited = self._visited("accumulate", chunk)
                self._pages.accumulate(layer, chunk, _once(visited), _nothing)

    def _begin(self, phase: CallPhase, chunk: int, layer: int) -> None:
        """What comes before attention: pages of the chunk, and a choice unless all is seen."""
        if phase == "fill":
            self._pages.write(layer, chunk, _nothing)
            if layer == self._layers.last_filled and chunk not in self._call.swept:
                return  # the fill ends here, and nobody attends later
        rule, past = self._call.selection, self._chunks.first_page(chunk) * self._factor
        if rule is None or self._shapes[layer].window or past <= rule.max_pages:
            return
        if (layer, chunk) not in self._chose:
            self._chose.add((layer, chunk))
            self._pages.chosen(layer, chunk)

    def _attend(self, phase: CallPhase, chunk: int, layer: int) -> None:
        outputs, pages = self._outputs, self._pages
        kept_mlp = outputs.mlp_span(chunk, layer) is not None
        if phase == "fill" or not (kept_mlp or outputs.kept[chunk, layer]):
            visited = self._visited("fill" if phase == "fill" else "read", chunk)
            pages.attend(phase, layer, chunk, _once(visited), _no_piece)
            if kept_mlp:
                pages.keep_mlp(layer, chunk, _no_piece)
            return
        with self._visited("kept" if outputs.kept[chunk, layer] else "read", chunk):
            pages.attend(phase, layer, chunk, _once(nullcontext(_nothing)), _no_piece)
            if kept_mlp:
                pages.take_mlp(layer, chunk, _no_piece)

    @contextmanager
    def _visited(self, phase: Phase, chunk: int) -> Iterator[Callable[[Launch], None]]:
        """Notes what is copied inside."""
        before = self._pages.manager.stats()
        yield _nothing
        after = self._pages.manager.stats()
        loaded = after.h2d_bytes - before.h2d_bytes
        stored = after.d2h_bytes - before.d2h_bytes
        missed = after.misses - before.misses
        page = self._slot_bytes
        if phase == "accumulate":
            page = page * (1 + self._call.layout.grad_slots) // 2
        self._timeline.append(Visit(phase, chunk, loaded, stored, min(loaded, missed * page)))

    def _guess(self, layer: int, chunk: int) -> npt.NDArray[np.int64]:
        """Pages of the dry run that stand for the chosen ones."""
        call, max_pages = self._call, self._most_pages
        rule, past = call.selection, self._chunks.first_page(chunk) * self._factor
        assert rule is not None
        share = call.chosen_share(past)
        pages = []
        for sequence in range(call.batch):
            drawn = call.choices.draw(self._random, rule, past, share, self._factor)
            division = call.divisions[layer]
            if division.ranks > 1:
                numbers = division.numbers(self._chunks, self._chunks.past(chunk))[drawn]
                drawn = numbers[numbers >= 0].astype(np.int64)
            pages.append(sequence * max_pages + drawn)
        return np.concatenate(pages).astype(np.int64)


def _once(visited: AbstractContextManager[Callable[[Launch], None]]) -> Launching:
    """For one visit, however many launches it has."""
    return lambda parts: visited


def _nothing(*_: object) -> None:
    """In place of a kernel."""


def _no_piece(part: int, begin: int, end: int) -> tuple[int, int]:
    """In place of the memory of an output: an address that is not null."""
    return 1, 0


def _some_layers(call: PageCall) -> Sequence[LayerShape]:
    """As many of the layers as a dry run has time for, windows among them as in the whole."""
    if call.layers.shared or call.layout.page_sizes:
        return call.shapes
    total, chunks = len(call.shapes), call.filled + 2 * len(call.swept)
    windowed = sum(1 for shape in call.shapes if shape.window)
    enough = _VISITS // max(1, chunks)
    if call.selection is not None:  # coarser pages would blur what is chosen
        enough = min(enough, _PAGE_VISITS * total // max(1, _page_visits(call, call.shapes)))
    for number in range(max(4, enough), total):
        some = call.shapes[:number]
        whole = number % call.shapes[0].groups == 0
        if whole and sum(1 for shape in some if shape.window) * total == windowed * number:
            return some
    return call.shapes


def _coarseness(call: PageCall, shapes: Sequence[LayerShape]) -> int:
    """Real pages per page of the dry run: a divisor of a chunk's, 1 where the call is short.

    If it can be, also a divisor of the pages that layers with a window have of a chunk: a coarse
    page that holds one of them is there as a whole.
    """
    layers, visits = call.layers, _page_visits(call, shapes)
    per_chunk = math.gcd(*(chunks.most_pages for chunks in layers.chunks))
    kinds = set(zip(layers.chunks, layers.widest, strict=True))
    exact = math.gcd(per_chunk, *(most_of_chunk(*kind) for kind in kinds))
    for whole, patience in ((exact, 1), (exact, _PATIENCE), (per_chunk, 1)):
        for pages in range(1, whole + 1):
            if whole % pages == 0 and visits <= pages * patience * _PAGE_VISITS:
                return pages
    return per_chunk


def _page_visits(call: PageCall, shapes: Sequence[LayerShape]) -> int:
    """Pages that the visits of some layers name, all together."""

    def named(window: int, chunks: Iterable[int]) -> float:
        if window:
            return sum(
                last - first
                for chunk in chunks
                for first, last in seen_past(call.chunks, chunk, window)
            )
        past = map(call.chunks.first_page, chunks)
        return sum(pages * call.chosen_share(pages) for pages in past)

    visits = 0.0
    for window, number in Counter(shape.window for shape in shapes).items():
        visits += number * (named(window, range(call.filled)) + 2 * named(window, call.swept))
    return int(call.batch * visits)
