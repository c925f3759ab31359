"""Page-sparse attention of one call: a rule says which past pages its query blocks see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from oomb.config import PageRule, Past, TopKPages
from oomb.core.divided_chunks import Division
from oomb.core.layout import Chunks, PagedLayers
from oomb.core.page_demand import Demand
from oomb.core.page_lists import ListSizes, PageLists
from oomb.ops.page_bounds import page_bounds
from oomb.ops.pages import page_write
from oomb.ops.selection import top_k_lists
from oomb.parallel.heads import HeadShares
from oomb.parallel.list_parts import closed_up
from oomb.parallel.placement import Placement
from oomb.results import Selection


class Selector:
    """Chooses past pages by a rule in one call of the engine.

    A rule of the user's own is trusted as little as any argument: the shape of its lists is checked
    each time. Their values are checked each time on a CPU; on a GPU once per call, since the host
    has to wait for them.
    """

    def __init__(self, rule: PageRule, placement: Placement) -> None:
        self._rule = rule
        self._placement = placement
        self._is_ours = type(rule) is TopKPages
        self._checked = False

    @property
    def per_head(self) -> bool:
        """Each key/value head has a list of its own."""
        return self._rule.share == "kv_head"

    @torch.no_grad()
    def choose(
        self, q: torch.Tensor, summaries: torch.Tensor, past: Past, shares: HeadShares
    ) -> torch.Tensor:
        """Lists of a chunk's queries, as :meth:`oomb.PageRule.choose` gives them.

        A rule of the user's own sees the heads of all ranks; the first rank's lists hold.

        Args:
            q, summaries: of the heads that are held here.
            shares: who holds which.

        Raises:
            ValueError: they are not what the rule promised.
        """
        ranks, q = self._placement, q.detach()
        if isinstance(self._rule, TopKPages) and self._is_ours:
            q = ranks.queries_of_keys(q, shares)
            return top_k_lists(self._rule, q, summaries, past, _OneOfEach(ranks, shares.copies))
        q, summaries = ranks.whole_queries(q, shares), ranks.whole_keys(summaries, shares)
        lists = self._rule.choose(q, summaries, past)
        self._check(lists, q, summaries, past)
        return ranks.of_keys(_without_padding(lists, past), shares)

    def _check(
        self, lists: torch.Tensor, q: torch.Tensor, summaries: torch.Tensor, past: Past
    ) -> None:
        rule = self._rule
        name = f"{type(rule).__name__}.choose"
        heads = 1 if rule.share == "all_heads" else summaries.shape[2]
        blocks = -(-q.shape[2] // past.page_size)
        shape = (q.shape[0], blocks, heads, rule.max_pages)
        expected = f"int32 {list(shape)} on {q.device}"
        if not isinstance(lists, torch.Tensor):
            raise ValueError(f"{name}: expected {expected}, got {type(lists).__name__}")
        got = f"{lists.dtype} {list(lists.shape)} on {lists.device}".removeprefix("torch.")
        fits = tuple(lists.shape) == shape and lists.dtype == torch.int32
        if not fits or lists.device != q.device or not lists.is_contiguous():
            raise ValueError(f"{name}: expected contiguous {expected}, got {got}")
        if q.device.type == "cpu" or not self._checked:
            _check_values(name, lists, past)
            self._checked = True


@dataclass(frozen=True)
class _OneOfEach:
    """Ranks, of which ``copies`` neighbours have the same scores."""

    placement: Placement
    copies: int

    def total(self, x: torch.Tensor) -> torch.Tensor:
        speaks = self.placement.rank % self.copies == 0
        return self.placement.total(x if speaks else torch.zeros_like(x))

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return self.placement.largest(x)


def _is_prefix(past: tuple[tuple[int, int], ...]) -> bool:
    return len(past) == 1 and past[0][0] == 0


def _page_means(k: torch.Tensor, page_size: int, num_rows: torch.Tensor | None) -> torch.Tensor:
    """Mean keys [batch, pages, kv_heads, head_dim] of pages, as those who write them make them."""
    batch, heads, tokens, head_dim = k.shape
    pages = -(-tokens // page_size)
    written = k.new_empty(batch * pages, 2, heads, page_size, head_dim)
    slots = torch.arange(batch * pages, dtype=torch.int32, device=k.device).view(batch, pages)
    means = k.new_empty(batch, pages, heads, head_dim)
    page_write(k, k, written, slots, num_rows=num_rows, summary=means, check=False)
    return means


def _without_padding(lists: torch.Tensor, past: Past) -> torch.Tensor:
    """Pages behind a sequence's last token do not exist; a rule need not know."""
    if past.num_keys is None:
        return lists
    existing = -(-past.num_keys // past.page_size)
    return lists.masked_fill(lists >= existing[:, None, None, None], -1)


def _check_values(name: str, lists: torch.Tensor, past: Past) -> None:
    """Numbers of past pages, ascending, then -1."""
    inside = (lists >= -1) & (lists < past.num_pages)
    before, after = lists[..., :-1], lists[..., 1:]
    ascends = (after > before) & (before >= 0) | (after == -1)
    if not bool(inside.all()):
        low, high = (int(x) for x in torch.aminmax(lists))
        raise ValueError(
            f"{name}: expected pages in [0, {past.num_pages}) or -1, got {low} … {high} at layer "
            f"{past.layer}, chunk {past.chunk}"
        )
    if not bool(ascends.all()):
        row = lists[(~ascends).any(dim=-1)][0].tolist()
        raise ValueError(
            f"{name}: expected ascending pages, then -1, got {row} at layer {past.layer}, chunk "
            f"{past.chunk}"
        )


class PageChoice:
    """Past pages that the query blocks of a call see, under a :class:`oomb.PageRule`.

    A choice is made the first time that a layer's queries of a chunk exist: in the fill, for the
    chunk that the sweep begins with in the sweep. Every later pass uses it. So the sweep needs
    summaries for its first chunk alone; they are freed layer by layer.

    Args:
        summaries: per layer [batch, pages, kv_heads, head_dim or twice that], room for what is
            known of each page; None: the layer has a sliding window and sees all of it.

    Where ranks divide pages, each knows summaries of all and makes the same choice. Of it every
    rank keeps the pages that it has, by their numbers among these:

        chosen             0  5  6  9       pages 0-3 and 8-11 are rank 0's, 4-7 are rank 1's
        lists of rank 0    0  5  -  -       page 9 is its sixth
        lists of rank 1    1  2  -  -

    Attributes:
        copies: ranks that hold the same keys, and so have the same lists of each key.
        division: of the pages among these.
    """

    def __init__(
        self,
        selector: Selector,
        lists: PageLists,
        summaries: list[torch.Tensor | None],
        chunks: Chunks,
        layers: PagedLayers,
        copies: int,
        division: Division,
    ) -> None:
        self.lists = lists
        self.copies = copies
        self.division = division
        self._selector = selector
        self._summaries = summaries
        self._chunks = chunks
        self._layers = layers
        self._numbers: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}  # by past

    @staticmethod
    def of(demand: Demand, rule: PageRule, placement: Placement) -> PageChoice:
        """With room for the summaries of a call's pages, and for its lists.

        Raises:
            OutOfMemoryError: the host has no memory for the lists.
        """
        layout, batch, layers = demand.layout, demand.inputs.batch, demand.layers
        max_pages = max(demand.pages_per_sequence)
        known = max(demand.whole_pages_per_sequence)
        sizes = ListSizes.of(rule, demand.chunks, demand.shapes, batch)
        choosing = [layer for layer, shape in enumerate(demand.shapes) if not shape.window]
        summaries: list[torch.Tensor | None] = [None] * len(demand.shapes)
        for layer in layers.choosing_from:
            shape = (batch, known, layout.kv_heads, layout.summary_width(rule.summary))
            summaries[layer] = torch.zeros(shape, dtype=layout.dtype, device=demand.device)
        keeps = demand.reach is not None or demand.config.record_selection
        lists = demand.lists
        if lists is None:
            lists = PageLists(sizes, choosing, max_pages, demand.device, keeps=keeps)
        selector = Selector(rule, placement)
        copies, division = 1, Division()
        if choosing:
            copies, division = demand.shapes[choosing[0]].copies, demand.divisions[choosing[0]]
        return PageChoice(selector, lists, summaries, demand.chunks, layers, copies, division)

    def summarize(
        self,
        layer: int,
        chunk: int,
        k: torch.Tensor,
        page_size: int,
        num_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Room for the mean keys of a chunk's pages, to be written with them.

        Bounds are written at once, and so are means of pages that another rank has; then, and where
        nothing is chosen, there is no room. A last chunk, which nothing reads as past, has none
        either.

        Args:
            k: [batch, kv_heads, tokens, head_dim], the chunk's keys.
            num_rows: [batch], its real tokens; None: all.
        """
        summary = self._summaries[layer]
        if summary is None:
            return None
        first = self._chunks.first_page(chunk)
        own = summary[:, first : first - (-k.shape[2] // page_size)]
        means = own.shape[3] == k.shape[3]
        if means and self.division.owns(chunk):
            return own
        if own.shape[1] > 0:
            make = _page_means if means else page_bounds
            own.copy_(make(k.detach(), page_size, num_rows))
        return None

    def choose(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        first_key: torch.Tensor | None,
        num_keys: torch.Tensor | None,
        shares: HeadShares,
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
        chosen = self._selector.choose(q, summary, past, shares)
        if self.division.ranks > 1:
            chosen = self._of_rank(chosen, chunk)
        self.lists.keep(layer, chunk, chosen)

    def _of_rank(self, lists: torch.Tensor, chunk: int) -> torch.Tensor:
        """Lists of the pages that this rank has, by its own numbers."""
        past = self._chunks.past(chunk)
        if _is_prefix(past):  # one table of all pages is enough: the host waits for it once
            past = ((0, self._chunks.first_page(self._chunks.number)),)
        if past not in self._numbers:
            numbers = np.append(self.division.numbers(self._chunks, past), np.int32(-1))
            self._numbers[past] = torch.from_numpy(numbers).to(lists.device)
        return closed_up(self._numbers[past][lists.long()])  # -1 takes the last

    def of_call(self, num_layers: int, placement: Placement) -> Selection:
        """``[layer][chunk]``, on the host: what was chosen, of the heads of all ranks."""
        lists, per_head = self._of_sequence(num_layers), self._selector.per_head
        parted = self.division.ranks > 1
        if not per_head and not parted:
            return lists
        return placement.whole_lists(lists, self.copies, per_head=per_head, parted=parted)

    def _of_sequence(self, num_layers: int) -> Selection:
        """What this rank has kept, by numbers of the sequence's pages."""
        lists = self.lists.of_call(num_layers)
        if self.division.ranks == 1:
            return lists
        numbers = [
            np.append(
                np.flatnonzero(self.division.numbers(self._chunks, self._chunks.past(chunk)) >= 0),
                -1,  # of what pads a list
            )
            for chunk in range(self._chunks.number)
        ]
        return [
            [
                None if x is None else torch.from_numpy(number[x.numpy()].astype(np.int32))
                for x, number in zip(of_layer, numbers, strict=True)
            ]
            for of_layer in lists
        ]

    def _of_past(self, summary: torch.Tensor, chunk: int) -> torch.Tensor:
        """Summaries [batch, pages, kv_heads, width] of a chunk's past, where it is in ranges."""
        ranges = self._chunks.past(chunk)
        if _is_prefix(ranges):  # what lies behind is not looked at
            return summary
        return torch.cat([summary[:, first:last] for first, last in ranges], dim=1)

    def forget_summaries(self, layer: int) -> None:
        """No chunk is left to choose at a layer."""
        source = self._layers.sources[layer]
        if layer == self._layers.last_reader(source):
            self._summaries[source] = None
