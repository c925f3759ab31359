"""The pages of one call, and the order in which it reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb import _C
from oomb.config import PageRule
from oomb.core.gradient_reach import GradientReach
from oomb.core.kept_outputs import Keeping, KeptOutputs
from oomb.core.layout import Chunks
from oomb.core.list_sizes import ListSizes
from oomb.core.tiers import PageLayout, slots_of_call, wave_pages
from oomb.model.causal import LayerShape
from oomb.plan.choices import Choices


@dataclass(frozen=True, kw_only=True)
class PageCall:
    """Pages of one ``forward_backward``.

    Attributes:
        chunks: of the call.
        reach: chunks that receive gradient, and which of them have gradient pages.
        selection: the rule of page-sparse attention, None: dense.
        choices: what it is taken to choose.
        outputs: of attention that the fill keeps for the sweep; None: none.
    """

    chunks: Chunks
    reach: GradientReach
    shapes: tuple[LayerShape, ...]
    layout: PageLayout
    batch: int
    device_type: str
    selection: PageRule | None
    choices: Choices
    outputs: KeptOutputs | None = None

    @property
    def swept(self) -> tuple[int, ...]:
        """Chunks that receive gradient, ascending; those before the last of them are filled."""
        return self.reach.swept

    @property
    def filled(self) -> int:
        return self.swept[-1]

    @property
    def needed_slots(self) -> int:
        """Slots with which no page ever leaves the device."""
        per_chunk = self.chunks.first_page(1) * self.batch
        layers = len(self.shapes)
        gradients = self.reach.at_once(layers) * per_chunk
        kept = 0 if self.outputs is None else self.outputs.slots
        return kept + slots_of_call(self.layout, layers, self.filled * per_chunk, gradients)

    @property
    def nothing_kept(self) -> KeptOutputs:
        return KeptOutputs.none(self.chunks, self.layout, self.shapes, self.batch)

    @property
    def keeping(self) -> Keeping:
        """What could be kept of attention's outputs."""
        rule = self.selection
        return Keeping.of(
            self.nothing_kept,
            self.chunks,
            self.shapes,
            self.swept,
            self.batch,
            None if rule is None else rule.max_pages * self.chunks.page_size,
        )

    @property
    def smallest_slots(self) -> int:
        """Slots of the device tier below which the call cannot run."""
        return _C.smallest_device_slots(
            batch=self.batch,
            grad_slots=self.layout.grad_slots,
            backward=True,
            wave_pages=self.wave_pages,
        )

    @property
    def wave_pages(self) -> int:
        return wave_pages(torch.device(self.device_type), self.chunks.page_size)

    def chosen_share(self, past: int) -> float:
        """Part of ``past`` pages that one layer of a chunk reads."""
        rule = self.selection
        if rule is None or past <= rule.max_pages:
            return 1.0
        heads = 1 if rule.share == "all_heads" else self.layout.kv_heads
        return self.choices.share(rule, past, self.chunks.first_page(1), heads)

    @property
    def summary_bytes(self) -> int:
        """Mean keys of the pages, in torch's memory until the sweep has begun."""
        if self.selection is None:
            return 0
        layers = sum(1 for shape in self.shapes if not shape.window)
        pages = self.chunks.first_page(self.filled) * self.batch
        return layers * pages * self.layout.summary_bytes

    @property
    def score_bytes(self) -> int:
        """Scores of a layer's past pages for the blocks of a chunk, where there is a choice."""
        lists = self.lists
        if lists is None or lists.num_bytes == 0:
            return 0
        batch, blocks, heads, _ = lists.of_layer(0)
        size = 8 if self.layout.dtype == torch.float64 else 4
        return batch * blocks * heads * self.chunks.first_page(self.filled) * size

    @property
    def lists(self) -> ListSizes | None:
        """Page lists of the call."""
        if self.selection is None:
            return None
        return ListSizes.of(self.selection, self.chunks, self.shapes, self.batch)
