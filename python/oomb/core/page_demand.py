"""Which pages a call has, known before it runs, and what it asks of the page pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from oomb import _C
from oomb.config import Config, PageRule, TopKPages
from oomb.core.divided_chunks import Division, divided
from oomb.core.inputs import CallInputs
from oomb.core.keeping import Keeping, MlpOutput
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.latent_groups import Expanded, pages_at_once
from oomb.core.layout import Chunks, GradientReach, PagedLayers
from oomb.core.page_lists import ListSizes, PageLists
from oomb.core.tiers import PageLayout, wave_pages
from oomb.core.tree import TreeChunks
from oomb.core.window_pages import (
    existing_pages,
    gradients_in_window,
    most_gradients,
    most_of_chunk,
)
from oomb.model.layer_shape import LayerShape

_COUNTED_CHUNKS = 2**16  # up to which a window's pages are counted one by one, else bounded


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a block of queries chooses among the past's pages.

    Attributes:
        carried: share of its pages that a block takes over from the block before.
        first, latest: pages at the text's begin and before the chunk that every block chooses.
    """

    carried: float = 0.5
    first: int = 4
    latest: int = 8

    def share(self, rule: PageRule, past: int, blocks: int, heads: int) -> float:
        """Part of ``past`` pages, more than the budget, that one layer of a chunk chooses.

        Args:
            blocks: of queries in the chunk.
            heads: that choose for themselves.
        """
        expected = rule.expected_share(past, blocks)
        if expected is not None:
            return expected
        first, latest = self._forced(rule)
        free, others = rule.max_pages - first - latest, past - first - latest
        kept = self.carried * free
        # A page that is none of a block's is one of the next block's with this probability.
        fresh = (free - kept) / max(1.0, others - kept)
        left_out = ((1 - free / others) * (1 - fresh) ** (blocks - 1)) ** heads
        share = 1 - left_out * others / past
        bound = rule.chunk_budget if isinstance(rule, TopKPages) else None
        return share if bound is None else min(share, bound / past)

    def draw(
        self, random: np.random.Generator, rule: PageRule, past: int, share: float, together: int
    ) -> npt.NDArray[np.int64]:
        """``share`` of the past, in groups of ``together`` pages: ascending numbers of groups."""
        first, latest = (-(-number // together) for number in self._forced(rule))
        groups = past // together
        others = max(1, groups - first - latest)
        chosen = random.random(groups) < (share * groups - first - latest) / others
        chosen[:first] = chosen[groups - latest :] = True
        return np.flatnonzero(chosen)

    def _forced(self, rule: PageRule) -> tuple[int, int]:
        sinks, recent = 0, 0
        if isinstance(rule, TopKPages):
            sinks, recent = rule.sink_pages, rule.recent_pages
        first, latest = max(self.first, sinks), max(self.latest, recent)
        return (first, latest) if first + latest <= rule.max_pages else (sinks, recent)


UNIFORM = Choices(carried=0.0, first=0, latest=0)  # every page equally likely, block by block


@dataclass(frozen=True, kw_only=True)
class PageDemand:
    """Pages of one call.

    Attributes:
        reach: chunks that receive gradient, and which of them have gradient pages; None: evaluate.
        selection: the rule of page-sparse attention; None: dense.
        choices: what it is taken to choose.
        lengths: keys of each sequence without padding; None: all tokens.
        mlps: what the MLP of each layer gives, where the fill could keep it; empty: of no layer.
        outputs: that the fill keeps for the sweep; None: none.
        every_output: the fill runs all chunks to their end, though a sweep follows.
        border_bytes: of the host's memory that states at borders take.
        ranks: that share the sequences.
        rank: whose pages they are, where ranks divide them; of plain chunks the first has most.
    """

    chunks: Chunks
    reach: GradientReach | None
    shapes: Sequence[LayerShape]
    layout: PageLayout
    batch: int
    device_type: str
    selection: PageRule | None
    choices: Choices = field(default_factory=Choices)
    lengths: tuple[int, ...] | None = None
    mlps: tuple[MlpOutput | None, ...] = ()
    outputs: KeptOutputs | None = None
    every_output: bool = False
    border_bytes: int = 0
    ranks: int = 1
    rank: int = 0

    @property
    def swept(self) -> Sequence[int]:
        """Chunks that receive gradient, ascending."""
        return () if self.reach is None else self.reach.swept

    @property
    def filled(self) -> int:
        """Chunks whose keys and values are written to pages: nothing reads those of the last."""
        return self.chunks.number - 1 if self.whole_fill else self.swept[-1]

    @property
    def whole_fill(self) -> bool:
        """The fill runs every chunk and every layer to its end."""
        return self.reach is None or self.every_output

    @cached_property
    def layers(self) -> PagedLayers:
        """Layers with attention, and where their keys and values stand."""
        chooses = self.selection is not None
        layers = PagedLayers.of(self.shapes, self.chunks, self.layout, chooses=chooses)
        return divided(layers, self.divisions)

    @cached_property
    def divisions(self) -> list[Division]:
        """Of each layer's pages among ranks."""
        return [
            Division(shape.copies, self.rank % shape.copies) if shape.divided else Division()
            for shape in self.shapes
        ]

    @cached_property
    def pages_per_sequence(self) -> list[int]:
        """Last page + 1 of each sequence in the layer that has most, without those of its padding.

        A table has entries for all of them, also where a layer's windows leave out some.
        """
        return max(self._extents(self.layers.chunks[layer]) for layer in self.layers.storing)

    @property
    def whole_pages_per_sequence(self) -> list[int]:
        """The same of all ranks that divide pages, in a layer whose pages are chosen."""
        divided = any(division.ranks > 1 for division in self.divisions)
        return self._extents(self.chunks) if divided else self.pages_per_sequence

    def _extents(self, chunks: Chunks) -> list[int]:
        """Last page + 1 of each sequence, without those of its padding."""
        pages = chunks.first_page(self.filled)
        if self.lengths is None:
            return [pages] * self.batch
        return [min(pages, chunks.pages_of(length)) for length in self.lengths]

    @property
    def wave_pages(self) -> int:
        """Pages that a wave must not part."""
        smallest = min(chunks.page_size for chunks in self.layers.chunks)
        latent = any(shape.latent for shape in self.shapes)
        return wave_pages(torch.device(self.device_type), smallest, latent=latent)

    @cached_property
    def expanded(self) -> Expanded | None:
        """What is expanded of the past where pages hold latents; None: none of them does."""
        latents = [layer for layer, shape in enumerate(self.shapes) if shape.latent]
        if not latents:
            return None
        widest = max(latents, key=lambda layer: self.shapes[layer].kv_heads)
        shape, chunks = self.shapes[widest], self.layers.chunks[widest]
        at_once = pages_at_once(self.batch, self.wave_pages, chunks.page_size)
        past = chunks.first_page(self.filled)  # of the last chunk; in a tree no chunk has more
        return Expanded(
            heads=shape.kv_heads,
            width=shape.head_dim,
            page_size=chunks.page_size,
            group=self.wave_pages,
            at_once=min(at_once, past),
        )

    @property
    def smallest_slots(self) -> int:
        """Slots of the device tier below which the call cannot run."""
        return _C.smallest_device_slots(
            batch=self.batch,
            grad_slots=self.layout.grad_slots,
            backward=self.reach is not None,
            wave_pages=self.wave_pages,
        )

    @cached_property
    def page_slots(self) -> int:
        """Slots that pages have at once at most: the start of the sweep, with every page of both
        kinds alive; of the rank that has most."""
        uneven = isinstance(self.chunks, TreeChunks)  # chunks of several sizes
        ranks = max(division.ranks for division in self.divisions) if uneven else 1
        return max(replace(self, rank=rank)._own_slots for rank in range(ranks))

    @property
    def _own_slots(self) -> int:
        alike = Counter(
            (*self._kind_of(layer), self.divisions[layer]) for layer in self.layers.storing
        )
        return sum(number * self._slots_of(*kind) for kind, number in alike.items())

    def _kind_of(self, layer: int) -> tuple[Chunks, int]:
        return self.layers.chunks[layer], self.layers.widest[layer]

    def _slots_of(self, chunks: Chunks, window: int, division: Division) -> int:
        """Of a layer that stores keys and values."""
        extents, gradients = self._extents(chunks), 0
        if not window:
            slots = sum(extents)
            if self.reach is not None:
                at_start = self.reach.at_start
                reached = self.reach.at_once(one_more=self._reads_beside) - len(at_start)
                reached += division.most_of(at_start)
                gradients = min(reached * chunks.most_pages, chunks.first_page(self.filled))
        elif self.filled > _COUNTED_CHUNKS:
            kept = self.filled * most_of_chunk(chunks, window)
            slots = sum(min(kept, pages) for pages in extents)
            if self.reach is not None:
                gradients = most_gradients(chunks, window)
        else:
            exist = existing_pages(chunks, window, self.filled)
            slots = sum(int(exist[:pages].sum()) for pages in extents)
            if self.reach is not None:
                found = gradients_in_window(chunks, window, self.reach, exist)
                gradients = found.between + found.own * self._reads_beside
        return slots + gradients * self.batch * self.layout.grad_slots

    @cached_property
    def _reads_beside(self) -> bool:
        """Gradients of a chunk's own pages are alive beside all others that are counted.

        A layer reads them after it has added to its past. By then keys and values of that chunk are
        given back in all layers, which is room enough, mostly: a single layer has less, and layers
        whose keys and values others read (shared) all add before the first one reads.
        """
        pages = [most_of_chunk(*self._kind_of(layer)) for layer in self.layers.storing]
        return self.layers.shared or sum(pages) < self.layout.grad_slots * max(pages)

    @property
    def needed_slots(self) -> int:
        """Slots with which no page ever leaves the device, beside what is kept."""
        return max(self.page_slots, self.smallest_slots)

    @property
    def transit_slots(self) -> int:
        """Slots besides, where pages leave the device: two tiers that are full exchange pages one
        at a time, and each is in both on its way."""
        return 2 * self.layout.grad_slots

    @property
    def nothing_kept(self) -> KeptOutputs:
        of_mlps = tuple(0 if mlp is None else mlp.chunk_bytes for mlp in self.mlps)
        return KeptOutputs.none(self.chunks, self.layout, self.shapes, self.batch, of_mlps)

    @cached_property
    def keeping(self) -> Keeping:
        """What could be kept of the fill."""
        rule = self.selection
        return Keeping.of(
            self.nothing_kept,
            self.chunks,
            self.shapes,
            self.swept,
            self.batch,
            None if rule is None else rule.max_pages * self.chunks.page_size,
            fill_attends=self.layers.fill_attends,
            mlps=self.mlps,
        )

    def chosen_share(self, past: int) -> float:
        """Part of ``past`` pages that one layer of a chunk reads."""
        rule = self.selection
        if rule is None or past <= rule.max_pages:
            return 1.0
        heads = 1 if rule.share == "all_heads" else self.layout.kv_heads
        return self.choices.share(rule, past, self.chunks.most_pages, heads)

    @property
    def list_sizes(self) -> ListSizes | None:
        """Of the call's page lists."""
        if self.selection is None:
            return None
        return ListSizes.of(self.selection, self.chunks, self.shapes, self.batch)

    @property
    def list_bytes(self) -> int:
        """Page lists in host memory."""
        return 0 if self.list_sizes is None else self.list_sizes.host_bytes(self.device_type)

    @property
    def choosing_bytes(self) -> int:
        """On the device until the sweep has begun: summaries of the pages, and the scores of a
        layer's past pages for the blocks of a chunk."""
        if self.selection is None:
            return 0
        layers = len(self.layers.choosing_from)
        pages = self.chunks.first_page(self.filled) * self.batch
        summary = self.layout.summary_bytes(self.selection.summary)
        return layers * pages * summary + self._score_bytes

    @property
    def _score_bytes(self) -> int:
        lists = self.list_sizes
        if lists is None or lists.num_bytes == 0:
            return 0
        batch, blocks, heads, _ = lists.of_layer(0)
        size = 8 if self.layout.dtype == torch.float64 else 4
        return batch * blocks * heads * self.chunks.first_page(self.filled) * size


@dataclass(frozen=True, kw_only=True)
class Demand(PageDemand):
    """Pages of one call on a batch that is there.

    Attributes:
        lists: that an earlier fill of the same call has chosen; None: none has.
        chained: a chunk needs states that the one before leaves.
        fills_all: the fill runs the attention of every layer: a mixer comes behind the last.
    """

    config: Config
    inputs: CallInputs
    lists: PageLists | None = None
    chained: bool = False
    fills_all: bool = False

    @staticmethod
    def of(
        config: Config,
        shapes: Sequence[LayerShape],
        layout: PageLayout,
        inputs: CallInputs,
        swept: list[int] | None,
        *,
        every_output: bool = False,
        mlps: tuple[MlpOutput | None, ...] = (),
        lists: PageLists | None = None,
        border_bytes: int = 0,
        chained: bool = False,
        fills_all: bool = False,
        ranks: int = 1,
    ) -> Demand:
        """
        Args:
            swept: chunks that receive gradient, ascending; None: evaluate.
            every_output, mlps, lists, border_bytes, chained, fills_all, ranks: as of the class.
        """
        num_keys = inputs.num_keys
        return Demand(
            chunks=inputs.chunks(config),
            reach=None if swept is None else GradientReach.of(config.backward, swept),
            shapes=shapes,
            layout=layout,
            batch=inputs.batch,
            device_type=inputs.input_ids.device.type,
            selection=rule_of(config),
            lengths=None if num_keys is None else tuple(int(x) for x in num_keys.tolist()),
            config=config,
            inputs=inputs,
            every_output=every_output,
            mlps=mlps,
            lists=lists,
            border_bytes=border_bytes,
            chained=chained,
            fills_all=fills_all,
            ranks=ranks,
        )

    @property
    def device(self) -> torch.device:
        return self.inputs.input_ids.device


def rule_of(config: Config) -> PageRule | None:
    """Of page-sparse attention; None: dense."""
    return config.attention if isinstance(config.attention, PageRule) else None
