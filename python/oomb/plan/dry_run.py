"""The page manager's run through a call, on pages that hold nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from oomb import _C
from oomb.config import PageRule
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import READ_OUTPUT, Chunks, Order, call_order
from oomb.core.tiers import Caps
from oomb.model.causal import LayerShape
from oomb.plan.pages import PageCall
from oomb.plan.timeline import Phase, Visit

# Longer calls run with coarser pages, and with some of their layers.
_PAGE_VISITS = 1_000_000
_VISITS = 4_000
_SLACK = 1.0  # of host memory: with few layers more has to move at once than in a real call


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
        self._factor = factor = _coarseness(call, len(self._shapes))
        page_size = call.chunks.page_size * factor
        self._call = call
        self._paired = caps.host_slots > 0 and call.selection is not None
        self._chunks = Chunks(call.chunks.tokens, call.chunks.chunk_size, page_size)
        self._slot_bytes = round(call.layout.slot_bytes * factor * self._layers_each)
        self._outputs = self._scaled_outputs()
        self._order = self._make_order()
        self._exact = call.selection is None
        smallest = call.smallest_slots
        scale = factor * self._layers_each
        self._manager = _C.PageManager(
            device="cpu",
            dry=True,
            slot_bytes=self._slot_bytes,
            device_slots=max(round(caps.device_slots / scale), smallest),
            host_slots=round(caps.host_capacity * (1 + _SLACK * (scale > 1)) / scale),
        )
        self._timeline: list[Visit] = []
        self._announced: set[tuple[int, int]] = set()  # (chunk, layer)
        self._random = np.random.default_rng(0)

    def _make_order(self) -> Order:
        windows = [shape.window for shape in self._shapes]
        call = self._call
        return call_order(
            self._chunks,
            windows,
            call.filled,
            call.swept,
            whole_fill=False,
            paired=self._paired,
            output_span=self._outputs.span,
        )

    def _scaled_outputs(self) -> KeptOutputs:
        """Outputs of the layers that are run, each of which stands for several."""
        outputs, each = self._call.outputs or self._call.nothing_kept, self._layers_each
        layers = len(self._shapes)
        kept = outputs.kept[:, :layers].copy()
        kept[:, -1] = False  # where the fill ends
        return replace(
            outputs,
            kept=kept,
            slot_bytes=self._slot_bytes,
            o_bytes=tuple(round(size * each) for size in outputs.o_bytes[:layers]),
            lse_bytes=tuple(round(size * each) for size in outputs.lse_bytes[:layers]),
        )

    def run(self) -> DryRunResult:
        """Runs the call; once per object."""
        call, chunks, manager = self._call, self._chunks, self._manager
        pages = chunks.first_page(call.filled)
        manager.begin_call(
            num_layers=len(self._shapes),
            pages_per_sequence=[pages] * call.batch,
            grad_slots=call.layout.grad_slots,
            visits=self._order.visits,
            exact=self._exact,
            wave_pages=max(1, call.wave_pages // self._factor),
            outputs=self._outputs.pieces_of_layer,
        )
        try:
            for layer in range(len(self._shapes)):
                for chunk in call.reach.at_start:
                    manager.create_gradients(layer, *self._own(chunk))
            self._fill()
            self._sweep()
            stats = manager.stats()
        finally:
            manager.end_call()
            manager.close()
        return DryRunResult(
            host_peak_bytes=stats["host_peak_bytes"],
            h2d_bytes=stats["h2d_bytes"],
            d2h_bytes=stats["d2h_bytes"],
            visits=tuple(self._timeline),
            layers_each=self._layers_each,
        )

    def _own(self, chunk: int) -> tuple[int, int]:
        return self._chunks.first_page(chunk), self._chunks.first_page(chunk + 1)

    def _fill(self) -> None:
        together, last = (2 if self._paired else 1), len(self._shapes) - 1
        for first in range(0, self._call.filled, together):
            turns = range(first, min(first + together, self._call.filled))
            for chunk in turns:
                self._create(chunk, 0)
            for layer in range(last):
                for chunk in turns:  # while one attends, the other's pages are on their way
                    self._visit("fill", int(self._order.fill[chunk, layer]), chunk, layer)
                    self._keep_output(chunk, layer)
                    self._create(chunk, layer + 1)
            for chunk in turns:  # the last layer chooses for the sweep
                if chunk in self._call.swept:
                    self._announce(chunk, last)

    def _create(self, chunk: int, layer: int) -> None:
        first, last = self._own(chunk)
        step = self._manager.max_create(layer)
        for page in range(first, last, step):
            stop = min(page + step, last)
            self._manager.create(layer, page, stop)
            self._manager.commit(layer, page, stop)

    def _sweep(self) -> None:
        call = self._call
        layers = range(len(self._shapes))
        for chunk in reversed(call.swept):
            for layer in layers:
                phase: Phase = "kept" if self._outputs.kept[chunk, layer] else "read"
                self._visit(phase, int(self._order.read[chunk, layer]), chunk, layer)
            for layer in reversed(layers):
                visit = int(self._order.accumulate[chunk, layer])
                added = call.reach.added(chunk)
                if added is not None:
                    self._manager.create_gradients(layer, *self._own(added))
                self._visit("accumulate", visit, chunk, layer)
                self._end_own(chunk, layer)

    def _visit(self, phase: Phase, visit: int, chunk: int, layer: int) -> None:
        self._announce(chunk, layer)
        before = self._manager.stats()
        if phase == "kept":
            self._take_output(visit, chunk, layer)
        else:
            for begin, end in self._manager.waves(visit):
                self._manager.acquire(visit, begin, end)
                self._manager.release(visit, begin, end)
        after = self._manager.stats()
        loaded, stored, missed = (
            after[name] - before[name] for name in ("h2d_bytes", "d2h_bytes", "misses")
        )
        page = self._slot_bytes
        if phase == "accumulate":
            page = page * (1 + self._call.layout.grad_slots) // 2
        self._timeline.append(Visit(phase, chunk, loaded, stored, min(loaded, missed * page)))

    def _keep_output(self, chunk: int, layer: int) -> None:
        if not self._outputs.kept[chunk, layer]:
            return
        for first, last in self._outputs.parts(chunk, layer):
            step = self._manager.max_outputs()
            for begin in range(first, last, step):
                self._manager.write_output(
                    layer=layer, begin=begin, end=min(begin + step, last), source=1, num_bytes=0
                )

    def _take_output(self, visit: int, chunk: int, layer: int) -> None:
        waves = self._manager.waves(visit)
        for first, last in self._outputs.parts(chunk, layer):
            for wave_begin, wave_end in waves:
                begin, end = max(first, wave_begin), min(last, wave_end)
                if begin < end:
                    self._manager.read_output(
                        visit=visit, begin=begin, end=end, target=1, num_bytes=0
                    )

    def _announce(self, chunk: int, layer: int) -> None:
        """Name the pages that a chunk's blocks choose, by a guess; unless they see all."""
        rule = self._call.selection
        past = self._chunks.first_page(chunk)
        if rule is None or self._shapes[layer].window:
            return
        if past * self._factor <= rule.max_pages or (chunk, layer) in self._announced:
            return
        self._announced.add((chunk, layer))
        listed = self._guess(past, rule)
        for table in (self._order.fill, self._order.read, self._order.accumulate):
            visit = int(table[chunk, layer])
            if visit >= 0 and self._order.visits[visit, 1] != READ_OUTPUT:
                self._manager.set_visit_pages(visit, listed)

    def _guess(self, past: int, rule: PageRule) -> npt.NDArray[np.int64]:
        """Pages of the dry run that stand for the chosen ones."""
        call, max_pages = self._call, self._chunks.first_page(self._call.filled)
        share = call.chosen_share(past * self._factor)
        pages = [
            sequence * max_pages
            + call.choices.draw(self._random, rule, past * self._factor, share, self._factor)
            for sequence in range(call.batch)
        ]
        return np.concatenate(pages).astype(np.int64)

    def _end_own(self, chunk: int, layer: int) -> None:
        swept, manager = self._call.swept, self._manager
        first, last = self._own(chunk)
        if chunk != swept[-1]:
            step = manager.max_gradients(layer)
            for page in range(first, last, step):
                stop = min(page + step, last)
                manager.acquire_gradients(layer, page, stop)
                manager.drop(layer, page, stop, kv=False, grads=True)
        earlier = [c for c in swept if c < chunk]
        dead_from = self._chunks.first_page(earlier[-1]) if earlier else 0
        manager.drop(layer, dead_from, first, kv=True, grads=False)


def _some_layers(call: PageCall) -> Sequence[LayerShape]:
    """As many of the layers as a dry run has time for, windows among them as in the whole."""
    total, chunks = len(call.shapes), call.filled + 2 * len(call.swept)
    windowed = sum(1 for shape in call.shapes if shape.window)
    enough = _VISITS // max(1, chunks)
    if call.selection is not None:  # coarser pages would blur what is chosen
        enough = min(enough, _PAGE_VISITS // max(1, _page_visits(call)))
    for number in range(max(4, enough), total):
        some = call.shapes[:number]
        if sum(1 for shape in some if shape.window) * total == windowed * number:
            return some
    return call.shapes


def _coarseness(call: PageCall, num_layers: int) -> int:
    """Real pages per page of the dry run: a divisor of a chunk's, 1 where the call is short."""
    per_chunk = call.chunks.first_page(1)
    visits = num_layers * _page_visits(call)
    divisors = [d for d in range(1, per_chunk + 1) if per_chunk % d == 0]
    return next((d for d in divisors if visits <= d * _PAGE_VISITS), per_chunk)


def _page_visits(call: PageCall) -> int:
    """Pages that a layer's visits name, all together."""

    def named(chunks: Iterable[int]) -> float:
        past = map(call.chunks.first_page, chunks)
        return sum(pages * call.chosen_share(pages) for pages in past)

    return int(call.batch * (named(range(call.filled)) + 2 * named(call.swept)))
