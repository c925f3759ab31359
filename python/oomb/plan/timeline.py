"""When copies between the tiers make the kernels wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Phase = Literal["fill", "read", "kept", "accumulate"]  # kept: an output instead of pages


class Visit(NamedTuple):
    """Attention of one layer of a chunk, and the copies that the page manager starts with it.

    Attributes:
        loaded, stored: bytes to and from the device.
        missed: of those loaded, what this visit itself needs; the rest is for later ones.
    """

    phase: Phase
    chunk: int
    loaded: int
    stored: int
    missed: int


def waiting_seconds(
    visits: Iterable[Visit],
    computing: Callable[[Visit], float],
    *,
    link: float,
    latency: float,
    paired: bool,
) -> float:
    """Seconds that kernels wait for copies.

    Copies queue up in each direction. Loads wait for the stores that make room for them, kernels
    for the loads of their own pages and for those that earlier visits have started.

    Args:
        computing: seconds of a visit with all that the layer computes around it.
        link: bytes/s each way.
        latency: seconds that a visit waits at least, where it or the one before loads something.
        paired: in the fill another chunk computes between the choice of pages and their use.
    """
    now = waited = previous = 0.0
    loads_done = stores_done = 0.0
    loading = False
    for visit in visits:
        seconds = computing(visit)
        begins = now - previous if paired and visit.phase == "fill" else now
        ready = loads_done
        if visit.stored:
            stores_done = max(stores_done, begins) + visit.stored / link
        if visit.loaded:
            room = max(loads_done, stores_done, begins)
            if visit.missed:
                ready = room + visit.missed / link
            loads_done = room + visit.loaded / link
        wait = max(ready - now, latency if loading or visit.loaded else 0.0)
        waited += wait
        now += wait + seconds
        previous, loading = seconds, visit.loaded > 0
    return waited
