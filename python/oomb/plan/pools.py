"""Peaks of the page pools in one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oomb.core.committed import committed_bytes
from oomb.core.layout import PagedLayers, first_page_in_window
from oomb.core.tiers import Caps
from oomb.core.window_pages import existing_pages
from oomb.plan.dry_run import DryRun, DryRunResult
from oomb.plan.pages import PageCall


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """Peaks of both pools in one call, and copies between them; bytes.

    Attributes:
        dry_run: what the copies were counted in; None: nothing moves, or it was not asked for.
    """

    device_peak_bytes: int
    host_peak_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    dry_run: DryRunResult | None = None


def pool_use(call: PageCall, caps: Caps, *, dry_run: bool = True) -> PoolUse:
    """Peaks of the pools under ``caps`` (from ``oomb.core.fit``).

    Without spilling exactly what the call will report; with it, the engine's own page manager runs
    the call on pages of a few bytes; or, without ``dry_run``, the least that the host tier holds.
    """
    slot = call.layout.slot_bytes

    def committed(in_use: int, max_slots: int, on_host: bool) -> int:
        return committed_bytes(
            in_use,
            slot_bytes=slot,
            max_slots=max_slots,
            device_type=call.device_type,
            on_host=on_host,
        )

    peak = slots_at_once(call)
    if peak > caps.device_slots and not dry_run:
        return least_pools(call, caps.device_slots)
    device = committed(min(peak, caps.device_slots) * slot, caps.device_slots, False)
    if peak <= caps.device_slots:
        return PoolUse(device_peak_bytes=device, host_peak_bytes=0, h2d_bytes=0, d2h_bytes=0)
    ran = DryRun(call, caps).run()
    most = min(caps.host_capacity, _needed_slots(call))
    host = min(ran.host_peak_bytes, most * slot)
    return PoolUse(
        device_peak_bytes=device,
        host_peak_bytes=committed(host, caps.host_capacity, True),
        h2d_bytes=ran.h2d_bytes,
        d2h_bytes=ran.d2h_bytes,
        dry_run=ran,
    )


def least_pools(call: PageCall, device_slots: int) -> PoolUse:
    """Sizes of the pools below which the call is refused, with so many slots on the device."""
    needed = _needed_slots(call)
    on_device = min(device_slots, needed)
    on_host = needed - on_device + call.transit_slots if needed > on_device else 0
    return PoolUse(
        device_peak_bytes=on_device * call.layout.slot_bytes,
        host_peak_bytes=on_host * call.layout.slot_bytes,
        h2d_bytes=0,
        d2h_bytes=0,
    )


def _needed_slots(call: PageCall) -> int:
    """Of pages and kept outputs that are there at once, at most, in both tiers together."""
    return call.page_slots + (0 if call.outputs is None else call.outputs.slots)


def slots_at_once(call: PageCall) -> int:
    """Most slots in use at once, if none has to go.

    Gradient pages come into being at their first touch, in the sweep of the last chunk mostly; a
    chunk's pages die when it has been swept, and with them the pages that only it read.
    """
    cut, layers, grad_slots = call.layers, range(len(call.shapes)), call.layout.grad_slots
    first_like = _first_like(cut)
    kv = {
        layer: existing_pages(cut.chunks[layer], cut.widest[layer], call.filled)
        for layer in cut.storing
        if first_like[layer] == layer
    }
    wanted = {layer: np.zeros_like(pages) for layer, pages in kv.items()}
    for layer in kv:
        for chunk in call.swept[:-1]:
            wanted[layer][slice(*cut.pages(layer, chunk))] = True
    created = {layer: np.zeros_like(pages) for layer, pages in wanted.items()}

    def changes(layer: int, position: int) -> tuple[int, int]:
        """Pages of a sequence, in slots, that come before a layer's backward, and that go then."""
        chunk, source, chunks = call.swept[position], cut.sources[layer], cut.chunks[layer]
        first = chunks.first_page(chunk)
        begin = first_page_in_window(chunks, chunk, cut.windows[layer])
        reached = max(begin, chunks.first_page(call.reach.first(chunk)))
        fresh = wanted[source][reached:first] & ~created[source][reached:first]
        created[source][reached:first] |= fresh
        come = grad_slots * int(fresh.sum())
        if source != layer:
            return come, 0
        own = created[layer][slice(*chunks.pages(chunk))]
        alive = chunks.first_page(call.swept[position - 1]) if position else 0
        gone = grad_slots * int(own.sum()) + int(kv[layer][alive:].sum())
        kv[layer] = kv[layer][:alive]
        return come, gone

    outputs = 0 if call.outputs is None else call.outputs.slots
    in_use = sum(int(kv[first_like[layer]].sum()) for layer in cut.storing) * call.batch + outputs
    peak = in_use
    for position in range(len(call.swept) - 1, -1, -1):
        if call.outputs is not None:  # taken back before its gradients come
            in_use -= sum(call.outputs.slots_of_chunk(call.swept[position], i) for i in layers)
        known: dict[int, tuple[int, int]] = {}
        for layer in reversed(layers):
            like = first_like[layer]
            if like not in known:
                known[like] = changes(like, position)
            come, gone = known[like]
            in_use += come * call.batch
            peak = max(peak, in_use)
            in_use -= gone * call.batch
    return peak


def _first_like(cut: PagedLayers) -> list[int]:
    """Of each layer the first one with as many pages as it at any time: mostly there are few kinds,
    and counting pages takes time. Layers that share pages are like no other."""
    shared = {source for layer, source in enumerate(cut.sources) if source != layer}
    firsts: dict[object, int] = {}
    found = []
    for layer, source in enumerate(cut.sources):
        alone = source == layer and layer not in shared
        kind = (id(cut.chunks[layer]), cut.windows[layer], cut.widest[layer]) if alone else layer
        found.append(firsts.setdefault(kind, layer))
    return found
