"""How one call is cut into chunks and pages, what it reads when, and how far gradient reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from oomb.config import BackwardRule, Config, TruncatedChunks
from oomb.core.tiers import PageLayout
from oomb.model.layer_shape import LayerShape

# A visit reads KV; or reads KV and adds to its gradient; or reads what was added; or, where it was
# kept, the output of attention instead of KV.
READ, ACCUMULATE, READ_GRADIENT, READ_OUTPUT = 0, 1, 2, 3

OutputSpan = Callable[[int, int], "tuple[int, int] | tuple[()] | None"]


@dataclass(frozen=True)
class Chunks:
    """Chunks of a call and the past pages each of them has."""

    tokens: int
    chunk_size: int
    page_size: int

    @staticmethod
    def of(config: Config, tokens: int) -> Chunks:
        return Chunks(tokens, config.chunk_size, config.page_size)

    @property
    def number(self) -> int:
        return -(-self.tokens // self.chunk_size)

    def span(self, chunk: int) -> tuple[int, int]:
        """First token and last + 1."""
        begin = chunk * self.chunk_size
        return begin, min(begin + self.chunk_size, self.tokens)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of all chunks, in order."""
        return [self.span(chunk) for chunk in range(self.number)]

    def first_page(self, chunk: int) -> int:
        """Page that a chunk starts with; for the number of chunks, the number of pages."""
        return chunk * self.most_pages

    @property
    def most_pages(self) -> int:
        """Pages of a whole chunk."""
        return self.chunk_size // self.page_size

    def pages(self, chunk: int) -> tuple[int, int]:
        """First page of a whole chunk's own and last + 1."""
        return self.first_page(chunk), self.first_page(chunk + 1)

    def pages_of(self, tokens: int) -> int:
        """Pages of the first ``tokens`` of the sequence, the last of them perhaps not full."""
        return -(-tokens // self.page_size)

    def past(self, chunk: int) -> tuple[tuple[int, int], ...]:
        """Pages [first, last) of a chunk's past, in the order of its tokens: at least one range."""
        return ((0, self.first_page(chunk)),)

    def pages_within(self, chunk: int, window: int) -> tuple[int, int]:
        """Those of :meth:`pages` that any later chunk sees through a sliding window; 0: all.

        The next chunk's first row sees farthest back, whichever chunk is next:

            chunk       [ page 0 | page 1 | page 2 | page 3 ][ row …
            window                    ┕━━━━━━━━━━━━━━━━━━━━━━━━┙        pages 1 … 3
        """
        first, last = self.pages(chunk)
        past = self.past_pages(chunk)
        hidden = _hidden_pages(past + last - first, self.page_size, window)
        return min(first + max(0, hidden - past), last), last

    def past_pages(self, chunk: int) -> int:
        """Pages that a chunk has before it."""
        return sum(last - first for first, last in self.past(chunk))

    def past_tokens(self, chunk: int) -> int:
        """Tokens that a chunk has before it; they fill their pages."""
        return self.past_pages(chunk) * self.page_size


@dataclass(frozen=True)
class PagedLayers:
    """Layers with attention, and where their keys and values stand.

    Of a layer with a sliding window only those pages exist that a later chunk sees: a chunk's own
    keys and values are never read from pages, so the others have no reader.

    Attributes:
        windows: sliding window of each, 0: none. Pages outside a chunk's window are not read.
        chunks: as each of them cuts them into its pages.
        sources: of each, the layer whose keys and values it reads: mostly its own.
        last_filled: the fill ends there; no layer behind it stores keys and values.
        fill_attends: layers, the first ones, whose attention the fill runs: all before the last
            filled, or before the groups of heads that make it up.
    """

    windows: tuple[int, ...]
    chunks: tuple[Chunks, ...]
    sources: tuple[int, ...]
    last_filled: int
    fill_attends: int

    @staticmethod
    def of(
        shapes: Sequence[LayerShape], chunks: Chunks, layout: PageLayout, *, chooses: bool
    ) -> PagedLayers:
        """
        Args:
            chooses: a page rule does. It chooses in the fill, in every layer: the fill ends at the
                last one.
        """
        layers = range(len(shapes))
        sources = tuple(
            layer if shape.source is None else shape.source for layer, shape in enumerate(shapes)
        )
        last = layers[-1] if chooses else max(sources)
        sizes = [layout.page_size_of(layer) for layer in layers]
        cut = {size: replace(chunks, page_size=size) for size in set(sizes)}
        return PagedLayers(
            windows=tuple(shape.window for shape in shapes),
            chunks=tuple(cut[size] for size in sizes),
            sources=sources,
            last_filled=last,
            fill_attends=last + 1 - shapes[last].groups,
        )

    @staticmethod
    def alike(chunks: Chunks, windows: Sequence[int]) -> PagedLayers:
        """Layers of one shape, each with keys and values of its own."""
        number = len(windows)
        sources, last = tuple(range(number)), number - 1
        return PagedLayers(tuple(windows), (chunks,) * number, sources, last, last)

    @property
    def number(self) -> int:
        return len(self.sources)

    @property
    def storing(self) -> list[int]:
        """Layers that have pages of their own."""
        return sorted(set(self.sources))

    @property
    def shared(self) -> bool:
        """Some layer reads another one's pages."""
        return len(self.storing) < self.number

    @property
    def choosing_from(self) -> list[int]:
        """Layers whose pages a page rule chooses among, in one layer or several."""
        return sorted(
            {s for s, window in zip(self.sources, self.windows, strict=True) if not window}
        )

    def stores(self, layer: int) -> bool:
        return self.sources[layer] == layer

    @cached_property
    def widest(self) -> tuple[int, ...]:
        """Of each layer the widest window of those that read its keys and values, 0: none."""
        seen: list[list[int]] = [[] for _ in self.sources]
        for source, window in zip(self.sources, self.windows, strict=True):
            seen[source].append(window)
        return tuple(max(windows) if windows and all(windows) else 0 for windows in seen)

    def pages(self, layer: int, chunk: int) -> tuple[int, int]:
        """First page and last + 1 that a layer has of a chunk, if it is filled and read at all."""
        return self.chunks[layer].pages_within(chunk, self.widest[layer])

    def last_reader(self, source: int) -> int:
        """The last layer that reads the keys and values of ``source``; the first in a backward."""
        return max(layer for layer in range(self.number) if self.sources[layer] == source)


@dataclass(frozen=True)
class Order:
    """The known order of a call's reads: a row (layer, kind, first page, last page + 1) per visit.

    Time runs down the rows:

        fill   chunk 0 … : layer 0 … L-2      (… L-1 in evaluate, which needs every output;
                                              less far where the last layers store nothing)
               paired: layer 0 of chunks 0 and 1, layer 1 of chunks 0 and 1, …, then chunks 2 and 3
        sweep  chunk last … 0: layer 0 … L-1 read (KV, or the output that the fill kept), each
               followed by the MLP's output where that was kept, then L-1 … 0 read and accumulate,
               each followed by the chunk's own gradient

    A layer that reads another one's keys and values stands there by the number of that one.

    Where a chunk's past is in several ranges, each has a row of its own, one after the other.

    Attributes:
        visits: int32 [T, 4].
        first_of: of each row [T], the first one of its chunk, layer and pass.
        fill, read, mlp, accumulate, own_gradient: first row of (chunk, layer), -1 where there is
            none.
    """

    visits: npt.NDArray[np.int32]
    first_of: npt.NDArray[np.int64]
    fill: npt.NDArray[np.int64]
    read: npt.NDArray[np.int64]
    mlp: npt.NDArray[np.int64]
    accumulate: npt.NDArray[np.int64]
    own_gradient: npt.NDArray[np.int64]

    def by_pass(self, per_visit: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """Sums of what is counted per visit [T], for each pass: float64 [chunks, layers]."""
        together = np.bincount(self.first_of, per_visit, len(per_visit))
        padded = np.append(together, 0.0)  # row -1
        return {
            "fill": padded[self.fill],
            "forward": padded[self.read] + padded[self.mlp],
            "backward": padded[self.accumulate] + padded[self.own_gradient],
        }


def call_order(
    layers: PagedLayers,
    filled: int,
    swept: Sequence[int],
    *,
    whole_fill: bool,
    paired: bool = False,
    output_span: OutputSpan = lambda chunk, layer: None,
    mlp_span: OutputSpan = lambda chunk, layer: None,
) -> Order:
    """Order of a call that fills chunks [0, filled) and sweeps ``swept`` (ascending) in reverse.

    Args:
        whole_fill: the fill runs every layer.
        paired: two chunks of the fill take turns, layer by layer.
        output_span: pieces of the output that is kept of a chunk and layer; empty: it lies
            elsewhere; None: it is not kept.
        mlp_span: the same of the MLP's output.
    """
    num_layers, sources = layers.number, layers.sources
    rows: list[tuple[int, int, int, int]] = []
    first_of: list[int] = []
    tables = [np.full((layers.chunks[0].number, num_layers), -1, dtype=np.int64) for _ in range(5)]
    fill, read, mlp, accumulate, own_gradient = tables

    def add(
        table: npt.NDArray[np.int64],
        chunk: int,
        layer: int,
        kind: int,
        *ranges: tuple[int, int],
    ) -> None:
        table[chunk, layer] = len(rows)
        first_of.extend([len(rows)] * len(ranges))
        owner = layer if kind == READ_OUTPUT else sources[layer]
        rows.extend((owner, kind, first, last) for first, last in ranges)

    def visit(table: npt.NDArray[np.int64], chunk: int, layer: int, kind: int) -> None:
        past = seen_past(layers.chunks[layer], chunk, layers.windows[layer])
        add(table, chunk, layer, kind, *past)

    together = 2 if paired else 1
    for first in range(0, filled, together):
        for layer in range(num_layers if whole_fill else layers.fill_attends):
            for chunk in range(first, min(first + together, filled)):
                visit(fill, chunk, layer, READ)
    for chunk in reversed(swept):
        for layer in range(num_layers):
            pieces = output_span(chunk, layer)
            if pieces is None:
                visit(read, chunk, layer, READ)
            elif pieces:
                add(read, chunk, layer, READ_OUTPUT, pieces)
            of_mlp = mlp_span(chunk, layer)
            if of_mlp:
                add(mlp, chunk, layer, READ_OUTPUT, of_mlp)
        for layer in reversed(range(num_layers)):
            visit(accumulate, chunk, layer, ACCUMULATE)
            first, last = layers.pages(layer, chunk)
            if chunk != swept[-1] and first < last and layers.stores(layer):
                add(own_gradient, chunk, layer, READ_GRADIENT, (first, last))
    visits = np.array(rows, dtype=np.int32).reshape(-1, 4)
    starts = np.array(first_of, dtype=np.int64)
    return Order(visits, starts, fill, read, mlp, accumulate, own_gradient)


def seen_past(chunks: Chunks, chunk: int, window: int) -> list[tuple[int, int]]:
    """Ranges of a chunk's past, without the pages that a window hides; some may be empty."""
    hidden = first_page_in_window(chunks, chunk, window)
    ranges = []
    for first, last in chunks.past(chunk):
        ranges.append((min(first + hidden, last), last))
        hidden = max(0, hidden - (last - first))
    return ranges


def first_page_in_window(chunks: Chunks, chunk: int, window: int) -> int:
    """Past pages of a chunk before the first one that any of its rows sees."""
    return _hidden_pages(chunks.past_pages(chunk), chunks.page_size, window)


def _hidden_pages(past: int, page_size: int, window: int) -> int:
    """Of ``past`` pages those that end before the window of the token behind them; 0: no window."""
    if window == 0:
        return 0
    return min(max(past * page_size - window + 1, 0) // page_size, past)


@dataclass(frozen=True)
class GradientReach:
    """Which chunks have gradient pages, and since when.

    Their number is largest when the last chunk is swept. With a ``window``, a chunk's pages are
    asked for when the first chunk that reaches it is swept:

        window 2     sweep of chunk 4    gradient pages of   2 3
                                    3                      1 2 3     until its own are read
                                    2                    0 1 2

    Attributes:
        swept: chunks that receive gradient, ascending.
        window: chunks that gradient reaches back; None: all.
    """

    swept: Sequence[int]
    window: int | None

    @staticmethod
    def of(rule: BackwardRule, swept: Sequence[int]) -> GradientReach:
        """``swept`` is kept as it is: a range of a long text's chunks takes no memory."""
        return GradientReach(swept, rule.window if isinstance(rule, TruncatedChunks) else None)

    @property
    def at_start(self) -> Sequence[int]:
        """Chunks that have gradient pages from the start of the sweep."""
        earlier = self.swept[:-1]
        return earlier if self.window is None else earlier[max(0, len(earlier) - self.window) :]

    def added(self, chunk: int) -> int | None:
        """The chunk that ``chunk`` is the first to reach, beside those of :attr:`at_start`."""
        if not self.window or chunk == self.swept[-1] or chunk < self.window:
            return None
        return chunk - self.window

    def first(self, chunk: int) -> int:
        """The first chunk that the gradient of ``chunk`` reaches."""
        return 0 if self.window is None else max(0, chunk - self.window)

    def at_once(self, *, one_more: bool) -> int:
        """Chunks with gradient pages, in every layer, at most.

        Args:
            one_more: while a layer reads its own, which it does after it has added to its past.
        """
        number, earlier = len(self.at_start), len(self.swept[:-1])
        return min(number + 1, earlier) if self.window and one_more else number
