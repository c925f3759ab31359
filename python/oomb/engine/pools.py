"""Page pools that an engine keeps from call to call, and the pages of one call in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oomb import _C
from oomb.config import Config, SampledChunks, TopKPages
from oomb.engine.call_pages import CallPages
from oomb.engine.inputs import CallInputs
from oomb.engine.layout import Chunks, Order, call_order
from oomb.engine.list_sizes import ListSizes
from oomb.engine.page_choice import PageChoice
from oomb.engine.page_lists import PageLists
from oomb.engine.plan import slots_of_call
from oomb.engine.selection import Selector
from oomb.engine.shortage import expect_room, leave_to_driver, refused
from oomb.engine.tiers import Caps, Held, PageLayout, page_manager, wave_pages
from oomb.errors import Error
from oomb.hf.model import LayerShape


class Pools:
    """The page manager of an engine.

    Between calls every page is dead: the device tier's memory is given back, pinned host memory is
    kept for the next call.

    Attributes:
        manager: None before the first call.
        selector_type: chooses the pages under :class:`oomb.TopKPages`; benches replace it.
        test_switches: further arguments of the page manager, for tests.
    """

    def __init__(self, device: torch.device, shapes: list[LayerShape]) -> None:
        self._device = device
        self._shapes = shapes
        self._key: object = None
        self.manager: _C.PageManager | None = None
        self.selector_type: Callable[..., Selector] = Selector
        self.test_switches: dict[str, object] = {}

    def close(self) -> None:
        """Give all memory back. The next call makes new pools."""
        if self.manager is not None:
            self.manager.close()
        self.manager = None

    def snapshot(self) -> dict[str, Any]:
        """Where every page is: slots by state, residency per layer, copies in flight."""
        if self.manager is None:
            return {}
        snapshot: dict[str, Any] = json.loads(self.manager.snapshot())
        return snapshot

    @contextmanager
    def call(
        self,
        config: Config,
        inputs: CallInputs,
        chunks: Chunks,
        layout: PageLayout,
        swept: list[int] | None,  # None: evaluate
        others: int,
        rounding_seed: int,
    ) -> Iterator[CallPages]:
        """Pages of one call; afterwards all of them are dead, whatever happened.

        Args:
            others: bytes that the call needs on the device besides its pages.

        Raises:
            OutOfMemoryError: the pages do not fit both tiers, or torch found no memory within.
        """
        try:
            yield self._begin(config, inputs, chunks, layout, swept, others, rounding_seed)
        except Error as error:
            error.snapshot = self.snapshot()
            raise
        except RuntimeError as error:
            snapshot = self.snapshot()
            shortage = refused(error, self._device, _committed(snapshot))
            if shortage is None:
                raise
            shortage.snapshot = snapshot
            raise shortage from error
        finally:
            if self.manager is not None:
                self.manager.end_call()

    def _begin(
        self,
        config: Config,
        inputs: CallInputs,
        chunks: Chunks,
        layout: PageLayout,
        swept: list[int] | None,
        others: int,
        rounding_seed: int,
    ) -> CallPages:
        num_layers = len(self._shapes)
        filled = chunks.number - 1 if swept is None else swept[-1]
        per_sequence = _pages_per_sequence(inputs, chunks, filled)
        expect_room(self._device, 0, others)
        kv_pages = sum(per_sequence)
        caps = self._caps(
            config, config.device_memory, inputs, chunks, layout, swept, kv_pages, others
        )
        pool_bytes = caps.device_slots * layout.slot_bytes
        expect_room(self._device, pool_bytes, others)
        given = leave_to_driver(self._device, pool_bytes)
        if given < pool_bytes:
            caps = self._caps(
                config, max(given, 1), inputs, chunks, layout, swept, kv_pages, others
            )
        # Where lists and pages have to travel, two chunks of the fill hide it for each other.
        paired = caps.host_slots > 0 and isinstance(config.attention, TopKPages)
        order = call_order(
            chunks,
            [shape.window for shape in self._shapes],
            chunks.number if swept is None else filled,
            swept or [],
            whole_fill=swept is None,
            paired=paired,
        )
        manager = self._manager_for(layout, caps, explicit_host=config.host_memory is not None)
        manager.begin_call(
            num_layers=num_layers,
            pages_per_sequence=per_sequence,
            grad_slots=layout.grad_slots,
            visits=order.visits,
            exact=not isinstance(config.attention, TopKPages),
            wave_pages=wave_pages(self._device, config.page_size),
        )
        spilled = caps.host_slots > 0
        choice: PageChoice | None = None
        if isinstance(config.attention, TopKPages):
            room = inputs.batch, max(per_sequence)
            choice = self._choice(config.attention, chunks, order, layout, room, spilled)
        rule = config.backward
        pages = CallPages(
            manager=manager,
            layout=layout,
            chunks=chunks,
            order=order,
            shapes=self._shapes,
            first_key=inputs.first_key,
            num_keys=inputs.num_keys,
            swept=swept or [],
            dkv_factor=rule.dkv_factor if isinstance(rule, SampledChunks) else 1.0,
            choice=choice,
            rounding_seed=rounding_seed,
            deterministic=config.deterministic,
            check_finite=config.check_finite,
            spilled=spilled,
            filled=filled,
            paired=paired,
        )
        for layer in range(num_layers):
            pages.tables.append(_table(manager.block_table(layer)))
            pages.gradient_tables.append(_table(manager.gradient_table(layer)))
            for chunk in pages.swept[:-1]:
                manager.create_gradients(
                    layer, chunks.first_page(chunk), chunks.first_page(chunk + 1)
                )
        return pages

    def _caps(
        self,
        config: Config,
        device_memory: int | str | None,
        inputs: CallInputs,
        chunks: Chunks,
        layout: PageLayout,
        swept: list[int] | None,
        kv_pages: int,
        others: int,
    ) -> Caps:
        gradient_pages = len((swept or [])[:-1]) * chunks.first_page(1) * inputs.batch
        needed = slots_of_call(layout, len(self._shapes), kv_pages, gradient_pages)
        smallest = _C.smallest_device_slots(
            batch=inputs.batch,
            grad_slots=layout.grad_slots,
            backward=swept is not None,
            wave_pages=wave_pages(self._device, config.page_size),
        )
        host_memory = config.host_memory
        assert not isinstance(device_memory, str) and not isinstance(host_memory, str)
        return Caps.of(
            layout,
            max(needed, smallest),
            self._device,
            device_memory,
            host_memory,
            smallest,
            others,
            self._held(layout),
        )

    def _choice(
        self,
        rule: TopKPages,
        chunks: Chunks,
        order: Order,
        layout: PageLayout,
        room: tuple[int, int],  # sequences, pages of the longest
        announces: bool,
    ) -> PageChoice:
        assert self.manager is not None
        batch, max_pages = room
        sizes = ListSizes.of(rule, chunks, self._shapes, batch)
        choosing = [layer for layer, shape in enumerate(self._shapes) if not shape.window]
        summaries: list[torch.Tensor | None] = [None] * len(self._shapes)
        for layer in choosing:
            shape = (batch, max_pages, layout.kv_heads, layout.head_dim)
            summaries[layer] = torch.zeros(shape, dtype=layout.dtype, device=self._device)
        return PageChoice(
            self.selector_type(rule, chunks, len(self._shapes)),
            PageLists(sizes, choosing, max_pages, self._device),
            summaries,
            chunks,
            order,
            self.manager,
            announces,
        )

    def _held(self, layout: PageLayout) -> Held | None:
        """The pools of the last call, where this one can use them."""
        if self.manager is None or self._key != self._key_of(layout):
            return None
        host = self.snapshot()["host"]
        return Held(self.manager.device_slots, host["max_slots"], host["committed_bytes"])

    def _key_of(self, layout: PageLayout) -> object:
        return layout.slot_bytes, tuple(sorted(self.test_switches.items()))

    def _manager_for(
        self, layout: PageLayout, caps: Caps, *, explicit_host: bool
    ) -> _C.PageManager:
        held = self._held(layout)
        fits = (
            held is not None
            and held.device_slots == caps.device_slots
            and held.host_slots >= caps.host_slots
        )
        if fits:
            assert self.manager is not None
            return self.manager
        self.close()
        self.manager = page_manager(
            self._device, layout, caps, explicit_host_memory=explicit_host, **self.test_switches
        )
        self._key = self._key_of(layout)
        return self.manager


def _committed(snapshot: dict[str, Any]) -> int:
    return int(snapshot["device"]["committed_bytes"]) if snapshot else 0


def _pages_per_sequence(inputs: CallInputs, chunks: Chunks, filled: int) -> list[int]:
    tokens = filled * chunks.chunk_size
    lengths = [tokens] * inputs.batch
    if inputs.num_keys is not None:
        lengths = [min(tokens, int(length)) for length in inputs.num_keys.tolist()]
    return [-(-length // chunks.page_size) for length in lengths]


def _table(table: Any) -> torch.Tensor:
    return table if isinstance(table, torch.Tensor) else torch.utils.dlpack.from_dlpack(table)
