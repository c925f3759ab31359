"""What one call asks of the page pools."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from oomb import _C
from oomb.config import Config, PageRule
from oomb.core.gradient_reach import GradientReach
from oomb.core.inputs import CallInputs
from oomb.core.kept_outputs import Keeping, KeptOutputs
from oomb.core.layout import Chunks
from oomb.core.page_lists import PageLists
from oomb.core.tiers import PageLayout, slots_of_call, wave_pages
from oomb.model.causal import LayerShape


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Pages of one call.

    Attributes:
        swept: chunks that receive gradient, ascending; None: evaluate.
        outputs: of attention that the fill keeps for the sweep; None: none.
        every_output: the fill runs all chunks to their end, though a sweep follows.
        lists: that an earlier fill of the same call has chosen; None: none has.
        border_bytes: of the host's memory that states at borders take.
        chained: a chunk needs states that the one before leaves.
        fills_all: the fill runs the attention of every layer: a mixer comes behind the last.
    """

    config: Config
    shapes: list[LayerShape]
    layout: PageLayout
    inputs: CallInputs
    swept: list[int] | None
    outputs: KeptOutputs | None = None
    every_output: bool = False
    lists: PageLists | None = None
    border_bytes: int = 0
    chained: bool = False
    fills_all: bool = False

    @property
    def device(self) -> torch.device:
        return self.inputs.input_ids.device

    @property
    def chunks(self) -> Chunks:
        return Chunks.of(self.config, self.inputs.tokens)

    @property
    def rule(self) -> PageRule | None:
        """Of page-sparse attention; None: dense."""
        attention = self.config.attention
        return attention if isinstance(attention, PageRule) else None

    @property
    def filled(self) -> int:
        """Chunks whose keys and values are written to pages: nothing reads those of the last."""
        if self.swept is None or self.every_output:
            return self.chunks.number - 1
        return self.swept[-1]

    @property
    def whole_fill(self) -> bool:
        """The fill runs every chunk and every layer to its end."""
        return self.swept is None or self.every_output

    @cached_property
    def pages_per_sequence(self) -> list[int]:
        """Pages of each sequence and layer, without those of its padding."""
        tokens, num_keys = self.filled * self.chunks.chunk_size, self.inputs.num_keys
        lengths = [tokens] * self.inputs.batch
        if num_keys is not None:
            lengths = [min(tokens, int(length)) for length in num_keys.tolist()]
        return [-(-length // self.chunks.page_size) for length in lengths]

    @property
    def wave_pages(self) -> int:
        """Pages that a wave must not part."""
        return wave_pages(self.device, self.config.page_size)

    @property
    def smallest_slots(self) -> int:
        """Slots of the device tier below which the call cannot run."""
        return _C.smallest_device_slots(
            batch=self.inputs.batch,
            grad_slots=self.layout.grad_slots,
            backward=self.swept is not None,
            wave_pages=self.wave_pages,
        )

    @cached_property
    def reach(self) -> GradientReach:
        """Chunks that have gradient pages."""
        return GradientReach.of(self.config.backward, self.swept or [])

    @property
    def needed_slots(self) -> int:
        """Slots with which no page ever leaves the device."""
        chunks = self.reach.at_once(len(self.shapes))
        gradients = chunks * self.chunks.first_page(1) * self.inputs.batch
        kv_pages = sum(self.pages_per_sequence)
        needed = slots_of_call(self.layout, len(self.shapes), kv_pages, gradients)
        kept = 0 if self.outputs is None else self.outputs.slots
        return max(needed + kept, self.smallest_slots)

    @property
    def nothing_kept(self) -> KeptOutputs:
        return KeptOutputs.none(self.chunks, self.layout, self.shapes, self.inputs.batch)

    @property
    def keeping(self) -> Keeping:
        """What could be kept of attention's outputs."""
        batch, rule = self.inputs.batch, self.rule
        return Keeping.of(
            self.nothing_kept,
            self.chunks,
            self.shapes,
            self.swept or [],
            batch,
            None if rule is None else rule.max_pages * self.config.page_size,
        )
