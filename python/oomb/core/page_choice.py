"""Page-sparse attention of one call: choosing past pages, and telling the page manager of them."""

from __future__ import annotations

import torch

from oomb import _C
from oomb.config import PageRule, Past
from oomb.core.demand import Demand
from oomb.core.layout import READ_OUTPUT, Chunks, Order
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
        announces: the manager shall know what is chosen, because pages move.
    """

    def __init__(
        self,
        selector: Selector,
        lists: PageLists,
        summaries: list[torch.Tensor | None],
        chunks: Chunks,
        order: Order,
        manager: _C.PageManager,
        announces: bool,
    ) -> None:
        self.lists = lists
        self._selector = selector
        self._summaries = summaries
        self._chunks = chunks
        self._order = order
        self._manager = manager
        self._announces = announces
        # (layer, chunk) of new lists, oldest first, and when the host has them
        self._unannounced: dict[tuple[int, int], torch.cuda.Event | None] = {}

    @staticmethod
    def of(
        demand: Demand,
        rule: PageRule,
        order: Order,
        manager: _C.PageManager,
        *,
        announces: bool,
        placement: Placement,
    ) -> PageChoice:
        """With room for the mean keys of a call, and for its lists.

        Raises:
            OutOfMemoryError: the host has no memory for the lists.
        """
        layout, batch, max_pages = (
            demand.layout,
            demand.inputs.batch,
            max(demand.pages_per_sequence),
        )
        sizes = ListSizes.of(rule, demand.chunks, demand.shapes, batch)
        choosing = [layer for layer, shape in enumerate(demand.shapes) if not shape.window]
        summaries: list[torch.Tensor | None] = [None] * len(demand.shapes)
        for layer in choosing:
            shape = (batch, max_pages, layout.kv_heads, layout.head_dim)
            summaries[layer] = torch.zeros(shape, dtype=layout.dtype, device=demand.device)
        keeps = demand.reach is not None or demand.config.record_selection
        lists = demand.lists
        if lists is None:
            lists = PageLists(sizes, choosing, max_pages, demand.device, keeps=keeps)
        selector = Selector(rule, placement)
        return PageChoice(selector, lists, summaries, demand.chunks, order, manager, announces)

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
        summary = self._summaries[layer]
        assert summary is not None
        past = Past(
            layer=layer,
            chunk=chunk,
            page_size=self._chunks.page_size,
            num_tokens=self._chunks.span(chunk)[0],
            first_key=first_key,
            num_keys=num_keys,
        )
        chosen = self._selector.choose(q, summary, past)
        self.lists.keep(layer, chunk, chosen)
        if self._announces:
            self._unannounced[layer, chunk] = _moment(q.device)

    def recall(self, layer: int, chunk: int) -> None:
        """The lists of an earlier fill are those of this one; its page manager is to be told."""
        if self._announces and self.lists.known(layer, chunk):
            self._unannounced[layer, chunk] = None

    def forget_summaries(self, layer: int) -> None:
        """No chunk is left to choose at a layer."""
        self._summaries[layer] = None

    def announce(self, layer: int, chunk: int) -> None:
        """Tell the page manager what a chunk reads, if that is new, and those that chose before it.

        The host waits until the lists are there, so this comes where the pages are needed at once.
        """
        if (layer, chunk) not in self._unannounced:
            return
        oldest = None
        while oldest != (layer, chunk):
            oldest, arrival = next(iter(self._unannounced.items()))
            del self._unannounced[oldest]
            if arrival is not None:
                arrival.synchronize()
            self._tell_manager(*oldest)

    def _tell_manager(self, layer: int, chunk: int) -> None:
        pages = self.lists.pages(layer, chunk)
        order = self._order
        for visit in (
            int(table[chunk, layer]) for table in (order.fill, order.read, order.accumulate)
        ):
            if visit >= 0 and order.visits[visit, 1] != READ_OUTPUT:
                self._manager.set_visit_pages(visit, pages)


def _moment(device: torch.device) -> torch.cuda.Event | None:
    """When the stream has done what it was given until now; None: it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
