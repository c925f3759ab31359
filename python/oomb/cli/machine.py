"""What ``oomb doctor`` reads from the machine. Every reader works from a root folder, for tests."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from oomb.units import bytes_text

UNLIMITED = -1


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes; ``UNLIMITED`` where nothing limits, None where it cannot be read."""

    total: int | None
    available: int | None
    cgroup_limit: int | None
    cgroup_used: int | None
    pinned: int
    huge_pages: str | None

    @property
    def usable(self) -> int | None:
        """What the host tier could take now: the smaller of the machine's and the group's room."""
        rooms = [self.available] if self.available is not None else []
        if self.cgroup_limit not in (None, UNLIMITED) and self.cgroup_used is not None:
            assert self.cgroup_limit is not None
            rooms.append(max(0, self.cgroup_limit - self.cgroup_used))
        return min(rooms, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _meminfo(text: str | None, field: str) -> int | None:
    match = re.search(rf"^{field}:\s+(\d+) kB", text or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup(root: Path) -> tuple[int | None, int | None]:
    """(limit, used) of the memory control group, version 2 or 1."""
    for folder, limit_name, used_name in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read(root / folder / limit_name), _read(root / folder / used_name)
        if limit is None:
            continue
        # Version 1 writes "no limit" as a number near 2**63.
        unlimited = limit == "max" or int(limit) >= 1 << 60
        return UNLIMITED if unlimited else int(limit), int(used) if used else None
    return None, None


def read_memory_limits(root: Path = Path("/"), memlock: int | None = None) -> MemoryLimits:
    meminfo = _read(root / "proc/meminfo")
    limit, used = _cgroup(root)
    if memlock is None:
        memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", huge or "")
    return MemoryLimits(
        total=_meminfo(meminfo, "MemTotal"),
        available=_meminfo(meminfo, "MemAvailable"),
        cgroup_limit=limit,
        cgroup_used=used,
        pinned=UNLIMITED if memlock == resource.RLIM_INFINITY else memlock,
        huge_pages=chosen[1] if chosen else None,
    )


def format_bytes(count: int | None) -> str:
    if count is None:
        return "unknown"
    if count == UNLIMITED:
        return "unlimited"
    return bytes_text(count)
