"""GPUs that a plan can be made for without having one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its vendor's datasheet: memory and link in bytes (per second), dense bf16 FLOP/s."""

    name: str
    memory_bytes: int
    flops: float
    bytes_per_second: float
    link_bytes_per_second: float


_GB = 10**9
_TERA = 10**12
GPUS = {
    "h200": Gpu(
        name="H200",
        memory_bytes=141 * _GB,
        flops=989 * _TERA,
        bytes_per_second=4800 * _GB,
        link_bytes_per_second=64 * _GB,
    ),
    "h100": Gpu(
        name="H100",
        memory_bytes=80 * _GB,
        flops=989 * _TERA,
        bytes_per_second=3350 * _GB,
        link_bytes_per_second=64 * _GB,
    ),
    "a100": Gpu(
        name="A100",
        memory_bytes=80 * _GB,
        flops=312 * _TERA,
        bytes_per_second=2039 * _GB,
        link_bytes_per_second=32 * _GB,
    ),
    "l40s": Gpu(
        name="L40S",
        memory_bytes=48 * _GB,
        flops=362 * _TERA,
        bytes_per_second=864 * _GB,
        link_bytes_per_second=32 * _GB,
    ),
    "rtx4090": Gpu(
        name="RTX 4090",
        memory_bytes=24 * _GB,
        flops=165 * _TERA,
        bytes_per_second=1008 * _GB,
        link_bytes_per_second=32 * _GB,
    ),
}
