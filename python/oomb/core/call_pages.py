"""The pages of one call, and what each of its chunks sees."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oomb import _C
from oomb.config import SampledChunks
from oomb.core.divided_chunks import Division, KeyNumbers
from oomb.core.inputs import document_places
from oomb.core.layout import GradientReach, call_order
from oomb.core.loose_outputs import LooseOutputs
from oomb.core.page_choice import PageChoice
from oomb.core.page_demand import Demand
from oomb.core.page_protocol import Arrival, PageProtocol
from oomb.core.shortage import with_torchs_unused
from oomb.core.tiers import Caps, PageLayout
from oomb.ops.launch import stream_of
from oomb.parallel.placement import Placement


@dataclass(frozen=True, kw_only=True)
class CallPages(PageProtocol):
    """Pages of one call: tables over the manager's memory, and the order in which they are read.

    Attributes:
        batch: sequences.
        blocks: of each layer, tokens of the blocks that alone its queries see; 0: no blocks.
        latents: of each layer, numbers of a token in pages of latents; 0: keys and values.
        divisions: of each layer's pages among ranks.
        wave_pages: that a wave does not part.
        first_key, num_keys: as in :class:`oomb.core.inputs.CallInputs`.
        choice: which past pages are seen; None: all.
        rounding_seed: of bf16 gradient pages.
        paired: two chunks of the fill take turns.
    """

    device: torch.device
    layout: PageLayout
    batch: int
    blocks: Sequence[int]
    latents: Sequence[int]
    divisions: Sequence[Division]
    wave_pages: int
    first_key: torch.Tensor | None
    num_keys: torch.Tensor | None
    dkv_factor: float
    choice: PageChoice | None
    rounding_seed: int
    deterministic: bool
    check_finite: bool
    paired: bool

    @cached_property
    def tables(self) -> list[torch.Tensor]:
        """Per layer int32 [batch, pages]: the slot of each page."""
        return [_table(self.manager.block_table(layer)) for layer in self.layers.sources]

    @cached_property
    def gradient_tables(self) -> list[torch.Tensor]:
        """Per layer int32 [batch, pages, 2]: the slots of each page's gradient."""
        return [_table(self.manager.gradient_table(layer)) for layer in self.layers.sources]

    @cached_property
    def loose(self) -> LooseOutputs:
        """Outputs that are kept in torch's memory."""
        return LooseOutputs(self.outputs)

    @property
    def every_gradient(self) -> bool:
        """Every page that a chunk reads has a gradient page."""
        whole = self.reach.window is None and len(self.swept) == self.chunks.number
        return whole and self.num_keys is None

    @property
    def stream(self) -> int:
        """Handle of torch's current stream."""
        return stream_of(self.device)

    def moment(self) -> Arrival | None:
        """When the stream has done what it was given until now; None: it is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def growing(self, step: Callable[[], None]) -> None:
        """Take a step of the manager for which the device tier may have to grow."""
        with_torchs_unused(self.device, step)

    def first_key_of(self, chunk: int, block: int = 0) -> torch.Tensor | None:
        """int32 [B, C]: the first key that each row of a chunk sees; None: the first of all.

        Args:
            block: a row sees its own block of so many tokens of its document; 0: all of them.
        """
        begin, end = self.chunks.span(chunk)
        first = None if self.first_key is None else self.first_key[:, begin:end].contiguous()
        if not block:
            return first
        places = document_places(self.first_key, self.chunks, chunk, self.device)
        blocks = places - places % block
        return blocks.expand(self.batch, -1).contiguous() if first is None else first + blocks

    @property
    def pool(self) -> _C.PagePool:
        """The device tier as kernels see it: slots of keys and values."""
        return _C.PagePool(
            address=self.manager.pool_address(),
            slot_bytes=self.layout.slot_bytes,
            num_slots=self.manager.device_slots,
        )

    def past(self, layer: int, chunk: int, shift: int) -> _C.PastPages:
        """The past of a chunk's layer, with the pages that it has chosen.

        Args:
            shift: page of the call that is the table's first.
        """
        lists = None if self.choice is None else self.choice.lists.on_device(layer, chunk)
        return _C.PastPages(
            page_size=self.layout.page_size_of(layer),
            pool=self.pool,
            block_table=_behind(self.tables[layer], shift),
            num_tokens=self.layers.chunks[layer].past_tokens(chunk),
            selection=lists,
        )

    def past_gradients(self, layer: int, chunk: int, shift: int) -> _C.GradientPages:
        """Where a chunk's backward adds to the gradients of its past; ``shift`` as above."""
        seed = seed_of_chunk(self.rounding_seed, layer, chunk)
        return self._gradient_pages(_behind(self.gradient_tables[layer], shift), seed)

    def own_gradients(self, layer: int, chunk: int) -> _C.GradientPages:
        """What later chunks have left on a chunk's own keys and values."""
        first, last = self.layers.chunks[layer].pages(chunk)
        return self._gradient_pages(self.gradient_tables[layer][:, first:last], seed=0)

    def _gradient_pages(self, table: torch.Tensor, seed: int) -> _C.GradientPages:
        # They share the device tier with keys and values and may take half a slot.
        pool = _C.PagePool(
            address=self.manager.pool_address(),
            slot_bytes=self.layout.slot_bytes // 2,
            num_slots=2 * self.manager.device_slots,
        )
        dtype = str(self.layout.grad_dtype).removeprefix("torch.")
        return _C.GradientPages(pool=pool, table=table, dtype=dtype, rounding_seed=seed)

    def visibility(self, layer: int, chunk: int, window: int) -> _C.Visibility:
        """Which keys a chunk's queries may see."""
        first_key = self.first_key_of(chunk, self.blocks[layer])
        num_keys, division = self.num_keys, self.divisions[layer]
        if division.ranks > 1:
            if first_key is not None:
                first_key = self._key_numbers[division].of_keys(first_key)
            if num_keys is not None:
                num_keys = self._key_numbers[division].of_keys(num_keys)
            if not division.owns(chunk):
                num_keys = self._past_alone(layer, chunk, num_keys)
        return _C.Visibility(window=window, first_key=first_key, num_keys=num_keys)

    @cached_property
    def _key_numbers(self) -> dict[Division, KeyNumbers]:
        divisions = {division for division in self.divisions if division.ranks > 1}
        return {x: KeyNumbers.of(x, self.chunks, self.device) for x in divisions}

    def _past_alone(self, layer: int, chunk: int, num_keys: torch.Tensor | None) -> torch.Tensor:
        """int32 [B] in place of ``num_keys``: as if the chunk's own keys were padding."""
        past = self.layers.chunks[layer].past_tokens(chunk)
        if num_keys is None:
            return torch.full((self.batch,), past, dtype=torch.int32, device=self.device)
        return num_keys.clamp(max=past)


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
    demand = replace(demand, rank=placement.rank)
    # Where lists and pages have to travel, two chunks of the fill hide it for each other, unless
    # one needs the states that the other leaves.
    paired = spilled and demand.selection is not None and not demand.chained
    choice = None
    if demand.selection is not None:
        choice = PageChoice.of(demand, demand.selection, placement)
    rule = config.backward
    pages = CallPages(
        manager=manager,
        device=demand.device,
        layout=demand.layout,
        batch=demand.batch,
        blocks=[shape.block for shape in demand.shapes],
        latents=[shape.latent for shape in demand.shapes],
        divisions=demand.divisions,
        wave_pages=demand.wave_pages,
        chunks=chunks,
        layers=demand.layers,
        order=call_order(
            demand.layers,
            chunks.number if demand.whole_fill else demand.filled,
            swept,
            whole_fill=demand.whole_fill or demand.fills_all,
            paired=paired,
            output_span=outputs.span,
            mlp_span=outputs.mlp_span,
        ),
        outputs=outputs,
        first_key=demand.inputs.first_key,
        num_keys=demand.inputs.num_keys,
        swept=swept,
        reach=demand.reach or GradientReach((), None),
        dkv_factor=rule.dkv_factor if isinstance(rule, SampledChunks) else 1.0,
        choice=choice,
        lists=_no_lists if choice is None else choice.lists.pages,
        rounding_seed=rounding_seed,
        deterministic=config.deterministic,
        check_finite=config.check_finite,
        spilled=spilled,
        filled=demand.filled,
        paired=paired,
    )
    pages.begin(
        pages_per_sequence=demand.pages_per_sequence,
        grad_slots=demand.layout.grad_slots,
        exact=demand.selection is None,
        wave_pages=demand.wave_pages,
        device_slots=caps.device_slots,
    )
    return pages


def _behind(table: torch.Tensor, shift: int) -> torch.Tensor:
    return table[:, shift:] if shift else table


def _no_lists(layer: int, chunk: int) -> npt.NDArray[np.int64]:
    raise AssertionError("attention that sees all of its past has no page lists")


def _table(table: Any) -> torch.Tensor:
    return table if isinstance(table, torch.Tensor) else torch.utils.dlpack.from_dlpack(table)


def seed_of_call(step: int) -> int:
    """Of the rounding of gradient pages in the call number ``step`` of an engine; 64 bits."""
    key = hashlib.blake2b(f"oomb rounding {step}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little")


def seed_of_chunk(seed: int, layer: int, chunk: int) -> int:
    """Mixes a call's seed, layer and chunk; kernels add the page and the element."""
    mixed = seed ^ (layer << 40) ^ (chunk + 1)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64


def piece_of(
    tensors: Sequence[torch.Tensor], slot_bytes: int, part: int, begin: int, end: int
) -> tuple[int, int]:
    """Address and bytes of pieces [begin, end) of a tensor that is dense in memory."""
    tensor, offset = tensors[part], begin * slot_bytes
    return tensor.data_ptr() + offset, min(tensor.nbytes - offset, (end - begin) * slot_bytes)
