"""The pages of one call, and what each of its chunks sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomb import _C
from oomb.config import SampledChunks
from oomb.core.demand import Demand
from oomb.core.gradient_reach import GradientReach
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import Chunks, Order, call_order
from oomb.core.page_choice import PageChoice
from oomb.core.shortage import with_torchs_unused
from oomb.core.tiers import Caps, PageLayout
from oomb.ops.launch import stream_of
from oomb.parallel.placement import Placement


@dataclass(frozen=True, kw_only=True)
class CallPages:
    """Pages of one call: tables over the manager's memory, and the order in which they are read.

    Attributes:
        first_key, num_keys: as in :class:`oomb.core.inputs.CallInputs`.
        outputs: of attention that the fill keeps for the sweep.
        swept: chunks that receive gradient, ascending.
        reach: chunks that have gradient pages.
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
    outputs: KeptOutputs
    num_layers: int
    first_key: torch.Tensor | None
    num_keys: torch.Tensor | None
    swept: Sequence[int]
    reach: GradientReach
    dkv_factor: float
    choice: PageChoice | None
    rounding_seed: int
    deterministic: bool
    check_finite: bool
    spilled: bool
    filled: int
    paired: bool
    tables: list[torch.Tensor]
    gradient_tables: list[torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.tables[0].device

    @property
    def stream(self) -> int:
        """Handle of torch's current stream."""
        return stream_of(self.device)

    def first_key_of(self, chunk: int) -> torch.Tensor | None:
        """[B, C]: the first key that each row of a chunk sees; None: the first of all."""
        if self.first_key is None:
            return None
        begin, end = self.chunks.span(chunk)
        return self.first_key[:, begin:end].contiguous()

    def growing(self, step: Callable[[], None]) -> None:
        """Take a step of the manager for which the device tier may have to grow."""
        with_torchs_unused(self.device, step)


def begin_pages(
    demand: Demand,
    manager: _C.PageManager,
    caps: Caps,
    rounding_seed: int,
    placement: Placement,
) -> CallPages:
    """Begin a call on a page manager whose tiers hold it."""
    spilled = caps.host_slots > 0
    outputs = demand.outputs or demand.nothing_kept
    config, chunks, swept = demand.config, demand.chunks, demand.swept
    # Where lists and pages have to travel, two chunks of the fill hide it for each other, unless
    # one needs the states that the other leaves.
    paired = spilled and demand.selection is not None and not demand.chained
    order = call_order(
        chunks,
        [shape.window for shape in demand.shapes],
        chunks.number if demand.whole_fill else demand.filled,
        swept,
        whole_fill=demand.whole_fill or demand.fills_all,
        paired=paired,
        output_span=outputs.span,
    )
    reach = demand.reach or GradientReach((), None)
    num_layers = len(demand.shapes)
    manager.begin_call(
        num_layers=num_layers,
        pages_per_sequence=demand.pages_per_sequence,
        grad_slots=demand.layout.grad_slots,
        visits=order.visits,
        exact=demand.selection is None,
        wave_pages=demand.wave_pages,
        device_slots=caps.device_slots,
        outputs=outputs.pieces_of_layer,
    )
    choice = None
    if demand.selection is not None:
        choice = PageChoice.of(
            demand, demand.selection, order, manager, announces=spilled, placement=placement
        )
    for layer in range(num_layers):
        for chunk in reach.at_start:
            first, last = chunks.first_page(chunk), chunks.first_page(chunk + 1)
            manager.create_gradients(layer, first, last)
    rule = config.backward
    return CallPages(
        manager=manager,
        layout=demand.layout,
        chunks=chunks,
        order=order,
        outputs=outputs,
        num_layers=num_layers,
        first_key=demand.inputs.first_key,
        num_keys=demand.inputs.num_keys,
        swept=swept,
        reach=reach,
        dkv_factor=rule.dkv_factor if isinstance(rule, SampledChunks) else 1.0,
        choice=choice,
        rounding_seed=rounding_seed,
        deterministic=config.deterministic,
        check_finite=config.check_finite,
        spilled=spilled,
        filled=demand.filled,
        paired=paired,
        tables=[_table(manager.block_table(layer)) for layer in range(num_layers)],
        gradient_tables=[_table(manager.gradient_table(layer)) for layer in range(num_layers)],
    )


def _table(table: Any) -> torch.Tensor:
    return table if isinstance(table, torch.Tensor) else torch.utils.dlpack.from_dlpack(table)
