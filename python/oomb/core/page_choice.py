"""Page-sparse attention of one call: which past pages its query blocks see."""

from __future__ import annotations

import torch

from oomb.config import PageRule, Past
from oomb.core.demand import Demand
from oomb.core.layout import Chunks, PagedLayers
from oomb.core.list_sizes import ListSizes
from oomb.core.page_lists import PageLists
from oomb.core.selection import Selector
from oomb.parallel.placement import Placement


class PageChoice:
    """Past pages that the query blocks of a call see, under a :class:`oomb.PageRule`.

    A choice is made the first time that a layer's queries of a chunk exist: in the fill, for the
    chunk that the sweep begins with in the sweep. Every later pass uses it. So the sweep needs mean
    keys for its first chunk alone; they are freed layer by layer.

    Args:
        summaries: per layer [batch, pages, kv_heads, head_dim], room for the mean key of each page;
            None: the layer has a sliding window and sees all of it.
    """

    def __init__(
        self,
        selector: Selector,
        lists: PageLists,
        summaries: list[torch.Tensor | None],
        chunks: Chunks,
        layers: PagedLayers,
    ) -> None:
        self.lists = lists
        self._selector = selector
        self._summaries = summaries
        self._chunks = chunks
        self._layers = layers

    @staticmethod
    def of(demand: Demand, rule: PageRule, placement: Placement) -> PageChoice:
        """With room for the mean keys of a call, and for its lists.

        Raises:
            OutOfMemoryError: the host has no memory for the lists.
        """
        layout, batch, layers = demand.layout, demand.inputs.batch, demand.layers
        max_pages = max(demand.pages_per_sequence)
        sizes = ListSizes.of(rule, demand.chunks, demand.shapes, batch)
        choosing = [layer for layer, shape in enumerate(demand.shapes) if not shape.window]
        summaries: list[torch.Tensor | None] = [None] * len(demand.shapes)
        for layer in layers.choosing_from:
            shape = (batch, max_pages, layout.kv_heads, layout.head_dim)
            summaries[layer] = torch.zeros(shape, dtype=layout.dtype, device=demand.device)
        keeps = demand.reach is not None or demand.config.record_selection
        lists = demand.lists
        if lists is None:
            lists = PageLists(sizes, choosing, max_pages, demand.device, keeps=keeps)
        selector = Selector(rule, placement)
        return PageChoice(selector, lists, summaries, demand.chunks, layers)

    def summaries(self, layer: int) -> torch.Tensor | None:
        """Mean keys, to be written with the pages."""
        return self._summaries[layer]

    def choose(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        first_key: torch.Tensor | None,
        num_keys: torch.Tensor | None,
    ) -> None:
        """Choose for a chunk's queries [B, Hq, C, D], where the lists are wanted."""
        summary = self._summaries[self._layers.sources[layer]]
        assert summary is not None
        summary = self._of_past(summary, chunk)
        past = Past(
            layer=layer,
            chunk=chunk,
            page_size=self._chunks.page_size,
            num_tokens=self._chunks.past_tokens(chunk),
            first_key=first_key,
            num_keys=num_keys,
        )
        chosen = self._selector.choose(q, summary, past)
        self.lists.keep(layer, chunk, chosen)

    def _of_past(self, summary: torch.Tensor, chunk: int) -> torch.Tensor:
        """Mean keys [batch, pages, kv_heads, head_dim] of a chunk's past, where it is in ranges."""
        ranges = self._chunks.past(chunk)
        if len(ranges) == 1 and ranges[0][0] == 0:  # what lies behind is not looked at
            return summary
        return torch.cat([summary[:, first:last] for first, last in ranges], dim=1)

    def forget_summaries(self, layer: int) -> None:
        """No chunk is left to choose at a layer."""
        source = self._layers.sources[layer]
        if layer == self._layers.last_reader(source):
            self._summaries[source] = None
