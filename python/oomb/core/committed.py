"""Bytes that a page pool has taken from the machine for the slots that are in use."""

from __future__ import annotations

# Bytes by which a pool grows: (device tier, host tier).
_STEPS = {"cpu": (2**20, 2**20), "cuda": (2**28, 2**26)}
_UNITS = {"cpu": (2**16, 2**16), "cuda": (2**21, 2**27)}  # and what it is a multiple of


def committed_bytes(
    in_use: int, *, slot_bytes: int, max_slots: int, device_type: str, on_host: bool
) -> int:
    """Of a pool of which ``in_use`` bytes were in use at once.

    Args:
        max_slots: that the pool may ever have.
        device_type: of the machine that both tiers belong to.
        on_host: the host tier.
    """
    slots = -(-in_use // slot_bytes)
    step = max(1, _STEPS[device_type][on_host] // slot_bytes)
    mapped = min(-(-slots // step) * step, max_slots)
    unit = _UNITS[device_type][on_host]
    whole = -(-mapped * slot_bytes // unit) * unit
    return min(whole, max_slots * slot_bytes) if on_host else whole
