"""Whether a call fits a machine's memory, how much each tier gets of it, and which outputs.

The engine, ``engine.plan`` and ``oomb plan`` ask :func:`fit`, and nobody computes it elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from oomb.core.copying import Copying
from oomb.core.keeping import PRODUCT_SPEED, Keeping
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.page_demand import PageDemand
from oomb.core.tiers import TIER_SHARE, Caps, Held
from oomb.errors import OutOfMemoryError
from oomb.units import bytes_text

_ENOUGH = 0.8  # a pool of this share of what could be had is used again
_AGAIN = {"none": 0.0, "pointwise": 0.05, "layer": 1.0}  # of a chunk's forward, in backward
_OPTIONAL = 0.5  # of memory that nobody has given us: what ``auto`` may take beside the pages


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that a call may have, in bytes.

    A tier may take its cap, as far as there is so much beside the rest of the call; without a cap
    ``TIER_SHARE`` of what is free, less that rest.

    Attributes:
        one_memory: both tiers are in the host's memory (CPU).
        device_free, host_free: what is free; on a CPU both are the same.
        device_cap, host_cap: ``Config(device_memory=…, host_memory=…)``; None: no cap.
        others: that the call needs on the device besides its pages.
        activations: those of a chunk among them at each level of recompute, up to the call's; empty
            where they are not known.
        host_others: that lies in host memory besides its pages.
        host_spare: of a host tier without a cap, what only pages may take, for an optimizer that is
            still to come.
        stepping: that the device must hold after the call, instead of all of it.
        driver: that the device really gives to the pages; None: what it says.
    """

    one_memory: bool
    device_free: int
    host_free: int
    device_cap: int | None = None
    host_cap: int | None = None
    others: int = 0
    activations: tuple[int, ...] = ()
    host_others: int = 0
    host_spare: int = 0
    stepping: int = 0
    driver: int | None = None

    @staticmethod
    def least(rooms: Sequence[Room]) -> Room:
        """What every one of several ranks has."""

        def least(name: str) -> int:
            return min(int(getattr(room, name)) for room in rooms)

        def most(name: str) -> int:
            return max(int(getattr(room, name)) for room in rooms)

        def least_cap(name: str) -> int | None:
            caps = [getattr(room, name) for room in rooms]
            return min((int(cap) for cap in caps if cap is not None), default=None)

        return replace(
            rooms[0],
            device_free=least("device_free"),
            host_free=least("host_free"),
            device_cap=least_cap("device_cap"),
            host_cap=least_cap("host_cap"),
            driver=least_cap("driver"),
            others=most("others"),
            activations=tuple(max(of) for of in zip(*(r.activations for r in rooms), strict=True)),
            host_others=most("host_others"),
        )

    @property
    def beside(self) -> int:
        """On the device beside the pages."""
        return self.others + (self.host_others if self.one_memory else 0)

    @property
    def device(self) -> int:
        """Of the device tier."""
        room = _room(self.device_free, self.device_cap, self.beside)
        return room if self.driver is None else min(room, self.driver)

    def host(self, on_device: int) -> int:
        """Of the host tier, beside a device tier of so many bytes."""
        return _room(self.host_free, self.host_cap, self._host_beside(on_device))

    def device_for_outputs(self, pages: int) -> int:
        """What ``auto`` may take of the device beside the pages there."""
        left = _room_within_margin(self.device_free, self.device_cap, self.beside) - pages
        if self.driver is not None:
            left = min(left, self.driver - pages)
        return max(0, left if self.device_cap is not None else int(_OPTIONAL * left))

    def host_for_outputs(self, on_device: int, pages: int) -> int:
        """What ``auto`` may take of the host beside the pages there."""
        beside = self._host_beside(on_device)
        left = _room_within_margin(self.host_free, self.host_cap, beside) - pages
        if self.host_cap is None:
            left = min(int(_OPTIONAL * left), left - self.host_spare)
        return max(0, left)

    def _host_beside(self, on_device: int) -> int:
        return self.beside + on_device if self.one_memory else self.host_others


def _room(free: int, cap: int | None, beside: int) -> int:
    if cap is None:
        return max(0, int(free * TIER_SHARE) - beside)
    return max(0, min(cap, free - beside))


def _room_within_margin(free: int, cap: int | None, beside: int) -> int:
    room = int(free * TIER_SHARE) - beside
    return room if cap is None else min(cap, room)


@dataclass(frozen=True)
class Fit:
    """A call that fits.

    Attributes:
        caps: slots of both tiers.
        outputs: that the fill keeps for the sweep.
    """

    caps: Caps
    outputs: KeptOutputs


def fit(
    demand: PageDemand,
    keep_outputs: str | float,
    room: Room,
    *,
    linear_flops: float = 0.0,
    held: Held | None = None,
) -> Fit:
    """Sizes of the tiers for a call, and the outputs it keeps in them or in torch's memory.

    Args:
        keep_outputs: as of :class:`oomb.Config`.
        linear_flops: as of :class:`oomb.core.copying.Copying`.
        held: pools that can be used again.

    Raises:
        OutOfMemoryError: the call does not fit; the text has the bytes and what to change. Outputs
            that ``"auto"`` keeps are never the reason.
    """
    expect_room(max(room.beside, room.stepping), room.device_free)
    pages = _caps(demand, demand.needed_slots, room, held)
    if demand.reach is None or keep_outputs == "none":
        return Fit(pages, demand.nothing_kept)
    keeping = demand.keeping

    def kept(keeping: Keeping, held: Held | None, *, on_host: bool = True) -> Fit:
        if keep_outputs == "auto":
            return _worthwhile(demand, keeping, room, pages, linear_flops, held, on_host=on_host)
        share = 1.0 if keep_outputs == "all" else float(keep_outputs)
        return _all_of(demand, keeping, keeping.share(share), room, pages, held)

    loose: Fit | None = None
    if room.activations and not pages.host_slots:
        with suppress(OutOfMemoryError):
            # In torch's memory they take none of the pools that are there.
            found = kept(keeping.of_attention, None, on_host=False)
            loosened = found.outputs.loosened(room.activations)
            if loosened.loose and not found.caps.host_slots:
                loose = Fit(pages, loosened)
    if loose is not None and keep_outputs != "auto":
        return loose
    among_pages = kept(keeping, held)
    if loose is None:
        return among_pages
    spared = keeping.flops(loose.outputs) + _spared(demand, loose.outputs, linear_flops)
    lists = Copying(demand, linear_flops, 0.0).lists if among_pages.caps.host_slots else 0.0
    return loose if spared >= keeping.flops(among_pages.outputs) - lists else among_pages


def _spared(demand: PageDemand, loose: KeptOutputs, linear_flops: float) -> float:
    """Of layers that are not computed again as outputs in torch's memory go, as of
    :meth:`Keeping.flops`."""
    of_call = max((_AGAIN[level] for level in loose.levels), default=0.0)
    shares = sum(of_call - _AGAIN[loose.levels[chunk]] for chunk in demand.swept)
    tokens = demand.batch * demand.chunks.chunk_size / demand.ranks
    flops = shares * linear_flops * tokens * len(demand.shapes) / demand.shapes[0].groups
    return flops / PRODUCT_SPEED


def _all_of(
    demand: PageDemand,
    keeping: Keeping,
    outputs: KeptOutputs,
    room: Room,
    pages: Caps,
    held: Held | None,
) -> Fit:
    """What the caller has asked for.

    Raises:
        OutOfMemoryError: there is no room for it beside the pages.
    """
    if outputs.slots == 0:
        return Fit(pages, outputs)
    try:
        return Fit(_caps(demand, demand.needed_slots + outputs.slots, room, held), outputs)
    except OutOfMemoryError:
        slot = demand.layout.slot_bytes
        device = room.device // slot
        on_host = max(0, room.host(device * slot) // slot - demand.transit_slots)
        free = device + on_host - demand.needed_slots
        raise _too_much_kept(keeping, outputs, free) from None


def _caps(demand: PageDemand, needed: int, room: Room, held: Held | None) -> Caps:
    """Of a call that has at most ``needed`` slots in use at once."""
    slot, smallest = demand.layout.slot_bytes, demand.smallest_slots
    device = min(room.device // slot, needed)
    if device < smallest:
        raise OutOfMemoryError(
            f"device_memory: expected at least {bytes_text(smallest * slot)} for one step of "
            f"attention beside {bytes_text(room.beside)} of activations and gradients, got "
            f"{bytes_text(room.device)} of {bytes_text(room.device_free)} that are free; the page "
            "pool is out of memory. Raise device_memory, lower chunk_size or set "
            "recompute='layer'",
            needed_bytes=smallest * slot,
            available_bytes=room.device,
        )
    if held is not None and held.device_slots >= _ENOUGH * device:
        usable = min(device, held.device_slots)
        if usable >= smallest and needed <= usable:
            return Caps(usable, 0, held.host_slots)
        if usable >= smallest and needed + demand.transit_slots <= usable + held.host_slots:
            return Caps(usable, held.host_slots, held.host_slots)
    if device == needed:
        return Caps(device, 0, 0)
    needed += demand.transit_slots
    host = room.host(device * slot)
    capacity = host // slot
    if capacity + device < needed:
        raise OutOfMemoryError(
            f"the call needs {bytes_text(needed * slot)} of pages, device_memory holds "
            f"{bytes_text(device * slot)} and host_memory {bytes_text(host)}: the tiers are "
            "out of memory. Raise host_memory, set kv_grad_dtype='bfloat16' or shorten the "
            "sequence",
            needed_bytes=needed * slot,
            available_bytes=device * slot + host,
        )
    return Caps(device, min(capacity, needed), capacity)


def _worthwhile(
    demand: PageDemand,
    keeping: Keeping,
    room: Room,
    pages: Caps,
    linear_flops: float,
    held: Held | None,
    *,
    on_host: bool,
) -> Fit:
    """What saves more time than its copies take; where pages alone leave no room, nothing.

    Pages keep the slots that they have without outputs:

        device  [ pages …………………………… ][ outputs ]  half of the rest, all of a cap
        host    [ pages that spill ][ outputs ]  likewise; none where pages spill nothing and the
                                                 host's memory is the device's, or page lists would
                                                 have to travel for what saves less

    Args:
        on_host: outputs may be there, where pages are not.
    """
    slot, needed = demand.layout.slot_bytes, demand.needed_slots
    spills = needed > pages.device_slots
    of_device = of_host = 0
    if not spills:
        of_device = room.device_for_outputs(needed * slot) // slot
    if spills or (on_host and not room.one_memory):
        on_tier = (pages.device_slots + of_device) * slot
        spilled = needed - pages.device_slots + demand.transit_slots
        of_host = room.host_for_outputs(on_tier, spilled * slot) // slot
    copying = Copying(demand, linear_flops, 1 - pages.device_slots / needed)

    def within(of_device: int, of_host: int) -> Fit:
        outputs = keeping.worthwhile(of_device, of_device + of_host, demand.device_type, copying)
        device = pages.device_slots + min(of_device, outputs.slots)
        host = needed + outputs.slots - device
        capacity = room.host(device * slot) // slot if host else 0
        return Fit(Caps(device, host and capacity, capacity), outputs)

    wanted = within(of_device, of_host)
    if wanted.caps.host_slots and copying.lists:
        here = within(of_device, 0)
        if keeping.flops(wanted.outputs) - keeping.flops(here.outputs) <= copying.lists:
            wanted, of_host = here, 0
    if wanted.outputs.slots == 0:
        return Fit(pages, wanted.outputs)
    if held is None or not (
        _hold(held, pages, demand) and _nearly(held, wanted.caps, needed + wanted.outputs.slots)
    ):
        return wanted
    # Pools that are nearly as large are kept: to make new ones costs more than a few outputs.
    least = within(
        min(of_device, held.device_slots - pages.device_slots),
        min(of_host, held.host_slots - (needed - pages.device_slots)),
    )
    host = held.host_slots if least.caps.host_slots else 0
    return Fit(Caps(least.caps.device_slots, host, held.host_slots), least.outputs)


def _hold(held: Held, pages: Caps, demand: PageDemand) -> bool:
    """Whether pools that are there have room for the pages alone, as they are parted."""
    spilled = demand.needed_slots - pages.device_slots
    on_host = spilled + demand.transit_slots if spilled else 0
    return held.device_slots >= pages.device_slots and held.host_slots >= on_host


def _nearly(held: Held, wanted: Caps, slots: int) -> bool:
    """Whether pools that are there come near those that are wanted for so many slots."""
    on_host = slots - wanted.device_slots
    return (
        held.device_slots >= _ENOUGH * wanted.device_slots and held.host_slots >= _ENOUGH * on_host
    )


def _too_much_kept(keeping: Keeping, outputs: KeptOutputs, free_slots: int) -> OutOfMemoryError:
    """For outputs that the tiers cannot hold beside the pages; with the largest share they can."""
    free = max(0, free_slots) * outputs.slot_bytes
    fitting = keeping.most_within(free_slots) / len(keeping.order)
    return OutOfMemoryError(
        f"keep_outputs: expected room for {bytes_text(outputs.num_bytes)} beside the call's pages, "
        f"got {bytes_text(free)}: the tiers are out of memory. The largest share that fits is "
        f"keep_outputs={int(1000 * fitting) / 1000}; raise host_memory or device_memory for more",
        needed_bytes=outputs.num_bytes,
        available_bytes=free,
    )


def expect_room(needed: int, free: int) -> None:
    """Check that a device has room for what a call needs besides its pages.

    Args:
        free: below 0 in a plan of a device that cannot hold what stays on it either.

    Raises:
        OutOfMemoryError: it has not.
    """
    if needed <= free:
        return
    there = f"{bytes_text(free)} are free: the device is out of memory. Lower chunk_size, or set "
    there += "recompute='layer'"
    if free < 0:
        there = f"and what stays there between calls {bytes_text(-free)} more than there is: the "
        there += "device is out of memory"
    raise OutOfMemoryError(
        f"the call needs {bytes_text(needed)} on the device for the activations of a chunk and "
        f"the sums of gradients, {there}",
        needed_bytes=needed,
        available_bytes=max(0, free),
    )
