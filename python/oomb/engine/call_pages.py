"""The pages of one call, and what each of its chunks sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from oomb import _C
from oomb.engine.layout import Chunks, Order
from oomb.engine.page_choice import PageChoice
from oomb.engine.shortage import with_torchs_unused
from oomb.engine.tiers import PageLayout
from oomb.hf.model import LayerShape
from oomb.ops.launch import stream_of


@dataclass
class CallPages:
    """Pages of one call: tables over the manager's memory, and the order in which they are read.

    Attributes:
        first_key, num_keys: as in :class:`oomb.engine.inputs.CallInputs`.
        swept: chunks that receive gradient, ascending.
        choice: which past pages are seen; None: all.
        rounding_seed: of bf16 gradient pages.
        spilled: the device tier cannot hold the whole call.
        filled: chunks whose keys and values are written to pages.
        paired: two chunks of the fill take turns.
        tables, gradient_tables: per layer int32 [batch, pages]: the slot of each page.
    """

    manager: _C.PageManager
    layout: PageLayout
    chunks: Chunks
    order: Order
    shapes: list[LayerShape]
    first_key: torch.Tensor | None
    num_keys: torch.Tensor | None
    swept: list[int]
    dkv_factor: float
    choice: PageChoice | None
    rounding_seed: int
    deterministic: bool
    check_finite: bool
    spilled: bool
    filled: int
    paired: bool
    tables: list[torch.Tensor] = field(default_factory=list)
    gradient_tables: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.tables[0].device

    @property
    def stream(self) -> int:
        """Handle of torch's current stream."""
        return stream_of(self.device)

    @property
    def num_layers(self) -> int:
        return len(self.shapes)

    def first_key_of(self, chunk: int) -> torch.Tensor | None:
        """[B, C]: the first key that each row of a chunk sees; None: the first of all."""
        if self.first_key is None:
            return None
        begin, end = self.chunks.span(chunk)
        return self.first_key[:, begin:end].contiguous()

    def growing(self, step: Callable[[], None]) -> None:
        """Take a step of the manager for which the device tier may have to grow."""
        with_torchs_unused(self.device, step)
