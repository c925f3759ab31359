"""What one chunk took, from the running totals that the engine reports."""

from __future__ import annotations

from oomb.monitor.observer import Record
from oomb.results import Progress


class ChunkClock:
    """Turns the totals of a call into figures per chunk. A step may be several calls."""

    def __init__(self) -> None:
        self._last: Progress | None = None

    def chunk(self, now: Progress) -> Record:
        """The chunk that ``now`` reports: its time, traffic and waits; the tiers after it."""
        last = self._last
        if last is None or _new_call(last, now):
            last = Progress(phase="fill", chunk=-1, num_chunks=0, tokens_done=0, seconds=0.0)
        self._last = now
        return {
            "phase": now.phase,
            "chunk": now.chunk,
            "num_chunks": now.num_chunks,
            "seconds": now.seconds - last.seconds,
            "device_bytes": now.device_bytes,
            "host_bytes": now.host_bytes,
            "h2d_bytes": now.h2d_bytes - last.h2d_bytes,
            "d2h_bytes": now.d2h_bytes - last.d2h_bytes,
            "exposed_copy_seconds": now.exposed_copy_seconds - last.exposed_copy_seconds,
        }


def _new_call(last: Progress, now: Progress) -> bool:
    """Fill goes up, sweep goes down, and fill comes first."""
    if now.seconds < last.seconds:
        return True
    if now.phase == "fill":
        return last.phase == "sweep" or now.chunk <= last.chunk
    return last.phase == "sweep" and now.chunk >= last.chunk
