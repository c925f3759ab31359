"""How much longer a call takes whose host tier gets its memory while it runs."""

from __future__ import annotations

# Bytes/s at which pinned memory comes that is new to the machine: beside kernels, and to a call
# that waits for each piece (bench/results/pages-{growth,pinned}-h200-2026-11-22.json). It comes as
# fast as the hypervisor hands it out; what the machine has had before, several times as fast.
_BESIDE, _WAITED = 3.2e9, 3.9e9


def growth_seconds(num_bytes: int, fill_seconds: float = 0.0) -> float:
    """Seconds that a call waits for new memory of the host tier.

        fill    [ chunk ][ chunk ][ chunk ]                 [ sweep …
        memory  ══ beside it ══════════════▶══ the rest ═══▶

    Nearly all of it is needed when the sweep begins, which gives gradients to the whole past.

    Args:
        num_bytes: of the host tier that are not there yet.
        fill_seconds: that hide some of it.
    """
    return max(0.0, num_bytes - _BESIDE * fill_seconds) / _WAITED
