"""Page pools that an engine keeps from call to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from oomb import _C
from oomb.core.call_pages import CallPages, begin_pages
from oomb.core.demand import Demand
from oomb.core.kept_outputs import Rooms
from oomb.core.shortage import (
    expect_room,
    expect_room_for_outputs,
    leave_to_driver,
    refused,
)
from oomb.core.tiers import Caps, Held, PageLayout, device_room, host_room, page_manager
from oomb.errors import Error, OutOfMemoryError
from oomb.model.swap import Swaps
from oomb.parallel.placement import Placement


class Pools:
    """The page manager of an engine.

    Between calls every page is dead: the device tier's memory is given back, pinned host memory is
    kept for the next call.

    Attributes:
        manager: None before the first call.
        test_switches: further arguments of the page manager, for tests.
    """

    def __init__(self, device: torch.device, placement: Placement) -> None:
        self._device = device
        self._placement = placement
        self._key: object = None
        self.manager: _C.PageManager | None = None
        self._reclaim: Callable[[], None] = lambda: None
        self.test_switches: dict[str, object] = {}

    def close(self) -> None:
        """Give all memory back. The next call makes new pools."""
        self._reclaim()
        self._close()

    def _close(self) -> None:
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()

    def snapshot(self) -> dict[str, Any]:
        """Where every page is: slots by state, residency per layer, copies in flight."""
        if self.manager is None:
            return {}
        snapshot: dict[str, Any] = json.loads(self.manager.snapshot())
        return snapshot

    def call(self, swaps: Swaps, demand: Demand, others: int, rounding_seed: int) -> CallPages:
        """Pages of one call; with ``swaps`` all of them die, whatever happened.

        Args:
            others: bytes that the call needs on the device besides its pages.

        Raises:
            OutOfMemoryError: the pages do not fit both tiers.
        """
        self._reclaim()
        swaps.afterwards(self._end_call)
        demand = self._keeping_outputs(demand, others)
        caps = self._agreed_caps(demand, others)

        def begin() -> CallPages:
            manager = self._manager_for(demand, caps)
            return begin_pages(demand, manager, caps, rounding_seed, self._placement)

        return self._placement.together(begin)

    def _agreed_caps(self, demand: Demand, others: int) -> Caps:
        """Sizes of the tiers that all ranks can have: whether pages spill decides their order."""
        caps = self._caps_with_room
        kept: list[Caps] = []

        def own(device_memory: int | str | None) -> int:
            kept.append(caps(demand, others, device_memory))
            return kept[-1].device_slots

        slots = self._placement.collect(lambda: own(demand.config.device_memory))
        if min(slots) < max(slots):
            least = min(slots) * demand.layout.slot_bytes
            self._placement.collect(lambda: own(least))
        spills = self._placement.collect(lambda: kept[-1].host_slots > 0)
        if len(set(spills)) > 1:
            raise OutOfMemoryError(
                "host_memory: expected ranks with as much of it, got some whose pages spill and "
                "some whose pages do not: the tiers are out of memory. Set device_memory and "
                "host_memory"
            )
        return kept[-1]

    def lend(self, reclaim: Callable[[], None]) -> None:
        """To a call that keeps its pages when it returns.

        Args:
            reclaim: ends its pages, unless it is running; called before those of the next call
                begin, and not only once.
        """
        self._reclaim()
        self._reclaim = reclaim

    def _end_call(self) -> None:
        if self.manager is not None:
            self.manager.end_call()
            if self.manager.keeps_device_memory:  # nobody else could have it
                self._close()

    @contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Errors of a call inside say where its pages were.

        Raises:
            OutOfMemoryError: torch found no memory within.
        """
        try:
            yield
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

    def _keeping_outputs(self, demand: Demand, others: int) -> Demand:
        """The demand with the outputs of attention that the fill shall keep.

        Raises:
            OutOfMemoryError: both tiers cannot hold what was asked for.
        """
        setting = demand.config.keep_outputs
        if demand.swept is None or setting == "none":
            return demand

        def expect_pages_to_fit() -> None:  # or say what is missing
            self._caps_with_room(demand, others, demand.config.device_memory)

        self._placement.collect(expect_pages_to_fit)
        keeping = demand.keeping
        rooms = Rooms.least(self._placement.collect(lambda: self._rooms(demand, others)))
        outputs = keeping.wanted(setting, rooms, self._device.type)
        keeps = replace(demand, outputs=outputs)
        if setting != "auto":
            expect_room_for_outputs(keeping, outputs, rooms.all)
            return keeps

        def has_room() -> bool:
            try:
                self._caps_with_room(keeps, others, keeps.config.device_memory)
            except OutOfMemoryError:  # the device gives less than it says
                return False
            return True

        return keeps if all(self._placement.collect(has_room)) else demand

    def _rooms(self, demand: Demand, others: int) -> Rooms:
        config, slot, needed = demand.config, demand.layout.slot_bytes, demand.needed_slots
        held = self._held(demand)
        assert not isinstance(config.device_memory, str)
        assert not isinstance(config.host_memory, str)
        here = self._placement.neighbours
        device = device_room(self._device, config.device_memory, others, here) // slot
        on_cpu = self._device.type == "cpu"
        taken = demand.border_bytes + (device * slot if on_cpu else 0)  # one memory, given once
        kept = 0 if held is None else held.host_bytes
        host = host_room(config.host_memory, kept, taken, here) // slot
        return Rooms(
            device - needed, host, config.device_memory is not None, config.host_memory is not None
        )

    def _caps_with_room(self, demand: Demand, others: int, device_memory: int | str | None) -> Caps:
        """Sizes of the tiers; the device has what they and the rest of the call take of it."""
        expect_room(self._device, 0, others)
        caps = self._caps(demand, device_memory, others)
        pool_bytes = caps.device_slots * demand.layout.slot_bytes
        expect_room(self._device, pool_bytes, others)
        given = leave_to_driver(self._device, pool_bytes)
        return caps if given >= pool_bytes else self._caps(demand, max(given, 1), others)

    def _caps(self, demand: Demand, device_memory: int | str | None, others: int) -> Caps:
        host_memory = demand.config.host_memory
        assert not isinstance(device_memory, str) and not isinstance(host_memory, str)
        return Caps.of(
            demand.layout,
            demand.needed_slots,
            self._device,
            device_memory,
            host_memory,
            demand.smallest_slots,
            others,
            self._held(demand),
            demand.border_bytes,
            self._placement.neighbours,
        )

    def _held(self, demand: Demand) -> Held | None:
        """The pools of the last call, where this one can use them."""
        layout, host_memory = demand.layout, demand.config.host_memory
        assert not isinstance(host_memory, str)
        if self.manager is None or self._key != self._key_of(layout):
            return None
        host = self.snapshot()["host"]
        if host_memory is not None and host["max_slots"] * layout.slot_bytes > host_memory:
            return None
        return Held(self.manager.device_capacity, host["max_slots"], host["committed_bytes"])

    def _key_of(self, layout: PageLayout) -> object:
        return layout.slot_bytes, tuple(sorted(self.test_switches.items()))

    def _manager_for(self, demand: Demand, caps: Caps) -> _C.PageManager:
        held = self._held(demand)
        fits = (
            held is not None
            and held.device_slots >= caps.device_slots
            and held.host_slots >= caps.host_slots
        )
        if fits:
            assert self.manager is not None
            return self.manager
        self._close()
        self._key = self._key_of(demand.layout)
        self.manager = page_manager(
            self._device,
            demand.layout,
            caps,
            explicit_host_memory=demand.config.host_memory is not None,
            **self.test_switches,
        )
        return self.manager


def _committed(snapshot: dict[str, Any]) -> int:
    return int(snapshot["device"]["committed_bytes"]) if snapshot else 0
