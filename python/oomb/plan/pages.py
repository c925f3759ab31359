"""The pages of one call, and the order in which it reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb import _C
from oomb.config import TopKPages
from oomb.engine.layout import Chunks
from oomb.engine.plan import slots_of_call
from oomb.engine.tiers import PageLayout, wave_pages
from oomb.hf.model import LayerShape
from oomb.plan.choices import Choices


@dataclass(frozen=True, kw_only=True)
class PageCall:
    """Pages of one ``forward_backward``.

    Attributes:
        chunks: of the call.
        swept: chunks that receive gradient, ascending; those before the last of them are filled.
        selection: the rule of page-sparse attention, None: dense.
        choices: what it is taken to choose.
    """

    chunks: Chunks
    swept: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
    layout: PageLayout
    batch: int
    device_type: str
    selection: TopKPages | None
    choices: Choices

    @property
    def filled(self) -> int:
        return self.swept[-1]

    @property
    def needed_slots(self) -> int:
        """Slots with which no page ever leaves the device."""
        per_chunk = self.chunks.first_page(1) * self.batch
        gradients = (len(self.swept) - 1) * per_chunk
        layers = len(self.shapes)
        return slots_of_call(self.layout, layers, self.filled * per_chunk, gradients)

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
        if rule is None or past <= rule.budget:
            return 1.0
        heads = 1 if rule.share == "all_heads" else self.layout.kv_heads
        return self.choices.share(rule, past, self.chunks.first_page(1), heads)

    @property
    def summary_bytes(self) -> int:
        """Mean keys of the pages, in torch's memory."""
        if self.selection is None:
            return 0
        layers = sum(1 for shape in self.shapes if not shape.window)
        pages = self.chunks.first_page(self.filled) * self.batch
        return layers * pages * self.layout.slot_bytes // (2 * self.layout.page_size)

    @property
    def list_bytes(self) -> int:
        """Recorded page lists of all layers and chunks, in torch's memory; int32."""
        rule = self.selection
        if rule is None:
            return 0
        heads = 1 if rule.share == "all_heads" else self.layout.kv_heads
        blocks = self.chunks.first_page(1)
        sparse = sum(1 for c in range(self.filled + 1) if self.chunks.first_page(c) > rule.budget)
        layers = sum(1 for shape in self.shapes if not shape.window)
        return layers * sparse * self.batch * blocks * heads * rule.budget * 4
