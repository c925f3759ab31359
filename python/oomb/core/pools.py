"""Page pools that an engine keeps from call to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from oomb import _C
from oomb.config import Config
from oomb.core.call_pages import CallPages, begin_pages
from oomb.core.fit import Fit, Room, fit
from oomb.core.page_demand import Demand, PageDemand
from oomb.core.shortage import leave_to_driver, refused
from oomb.core.tiers import Caps, Held, PageLayout, free_memory, page_manager
from oomb.errors import Error
from oomb.model.swap import Swaps
from oomb.parallel.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a call needs or does besides its pages.

    Attributes:
        others: bytes on the device.
        activations: as of :class:`oomb.core.fit.Room`.
        host_spare: bytes of the host's memory that only pages may take.
        linear_flops: per token of a layer, forward.
    """

    others: int = 0
    activations: tuple[int, ...] = ()
    host_spare: int = 0
    linear_flops: float = 0.0


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
        self._reclaim: Callable[[], None] = _nothing
        self._closed = False
        self.test_switches: dict[str, object] = {}

    def close(self) -> None:
        """Give all memory back. The next call makes new pools."""
        self._reclaim()
        self._close()

    def close_for_good(self) -> None:
        """Give all memory back, and take none again."""
        self._closed = True
        self.close()

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

    def call(self, swaps: Swaps, demand: Demand, needs: Needs, rounding_seed: int) -> CallPages:
        """Pages of one call; with ``swaps`` all of them die, whatever happened.

        Raises:
            OutOfMemoryError: the call does not fit.
        """
        self._reclaim()
        swaps.afterwards(self._end_call)
        found = self._agreed_fit(demand, needs)
        demand = replace(demand, outputs=found.outputs)

        def begin() -> CallPages:
            if self._closed:  # since the call was let in
                raise Error("engine: expected an open engine, got one that was closed")
            manager = self._manager_for(demand, found.caps)
            return begin_pages(demand, manager, found.caps, rounding_seed, self._placement)

        pages = self._placement.together(begin)
        swaps.afterwards(pages.loose.clear)
        return pages

    def _agreed_fit(self, demand: Demand, needs: Needs) -> Fit:
        """One that all ranks can have: what spills and what is kept decides their order."""
        config, placement = demand.config, self._placement
        seen = placement.collect(
            lambda: (self.room(demand, config, needs), self._held(demand.layout, config))
        )
        room = Room.least([room for room, _ in seen])
        held = seen[0][1] if all(held == seen[0][1] for _, held in seen) else None

        def own() -> Fit:
            return fit(
                demand, config.keep_outputs, room, linear_flops=needs.linear_flops, held=held
            )

        found = placement.together(own)
        pool_bytes = found.caps.device_slots * demand.layout.slot_bytes
        given = min(placement.collect(lambda: leave_to_driver(self._device, pool_bytes)))
        if given >= pool_bytes:
            return found
        room = replace(room, driver=given)
        return placement.together(own)

    def fit(self, demand: PageDemand, config: Config, needs: Needs) -> Fit:
        """How a call would fit what is free now, on this rank.

        Raises:
            OutOfMemoryError: it does not.
        """
        room, held = self.room(demand, config, needs), self._held(demand.layout, config)
        return fit(demand, config.keep_outputs, room, linear_flops=needs.linear_flops, held=held)

    def to_pin(self, host_bytes: int) -> int:
        """Of so many bytes of the host tier, those that are not pinned yet; 0 on a CPU."""
        if self._device.type == "cpu":
            return 0
        there = 0 if self.manager is None else self.manager.stats().host.ready_bytes
        return max(0, host_bytes - there)

    def room(self, demand: PageDemand, config: Config, needs: Needs) -> Room:
        """Memory that a call may have now, with that of the pools that are there."""
        assert not isinstance(config.device_memory, str)
        assert not isinstance(config.host_memory, str)
        on_cpu, here = self._device.type == "cpu", self._placement.neighbours
        host_free = free_memory(torch.device("cpu")) // here
        cap = config.host_memory
        if self.manager is not None:
            host_free += self.manager.stats().host.ready_bytes
        return Room(
            one_memory=on_cpu,
            device_free=host_free if on_cpu else free_memory(self._device),
            host_free=host_free,
            device_cap=config.device_memory,
            host_cap=None if cap is None else max(1, cap // here),
            others=needs.others,
            activations=needs.activations,
            host_others=0 if demand.reach is None else demand.list_bytes + demand.border_bytes,
            host_spare=needs.host_spare,
        )

    def lend(self, reclaim: Callable[[], None]) -> None:
        """To a call that keeps its pages when it returns.

        Args:
            reclaim: ends its pages, unless it is running; called before those of the next call
                begin, and not only once.
        """
        self._reclaim()
        self._reclaim = reclaim

    def are_lent_to(self, reclaim: Callable[[], None]) -> bool:
        """Whether no other call has borrowed them since."""
        return self._reclaim == reclaim

    def forget(self, reclaim: Callable[[], None]) -> None:
        """A call that was lent the pools is over; nothing of it stays alive here."""
        if self.are_lent_to(reclaim):
            self._reclaim = _nothing

    def _end_call(self) -> None:
        if self.manager is None:
            return
        try:
            self.manager.end_call()
        except Exception:
            self.manager = None  # copies may use its memory yet: it goes when they are over
            raise
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
            committed = 0
            if self.manager is not None:
                committed = self.manager.stats().device.committed_bytes
            shortage = refused(error, self._device, committed)
            if shortage is None:
                raise
            shortage.snapshot = self.snapshot()
            raise shortage from error

    def _held(self, layout: PageLayout, config: Config) -> Held | None:
        """The pools of the last call, where another one can use them."""
        if self.manager is None or self._key != self._key_of(layout):
            return None
        host = self.manager.stats().host
        assert not isinstance(config.host_memory, str)
        cap = config.host_memory
        if cap is not None and host.max_slots * layout.slot_bytes > cap:
            return None
        return Held(self.manager.device_capacity, host.max_slots)

    def _key_of(self, layout: PageLayout) -> object:
        return layout.slot_bytes, tuple(sorted(self.test_switches.items()))

    def _manager_for(self, demand: Demand, caps: Caps) -> _C.PageManager:
        host_memory = demand.config.host_memory
        held = self._held(demand.layout, demand.config)
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
            explicit_host_memory=host_memory is not None,
            **self.test_switches,
        )
        return self.manager


def _nothing() -> None:
    """Of pools that are lent to nobody."""
