"""Seeds of the stochastic rounding of bf16 gradient pages."""

from __future__ import annotations

import hashlib


def seed_of_call(step: int) -> int:
    """Of the call number ``step`` of an engine; 64 bits."""
    key = hashlib.blake2b(f"oomb rounding {step}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little")


def seed_of_chunk(seed: int, layer: int, chunk: int) -> int:
    """Mixes a call's seed, layer and chunk; kernels add the page and the element."""
    mixed = seed ^ (layer << 40) ^ (chunk + 1)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
