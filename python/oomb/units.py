"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def seconds_text(seconds: float) -> str:
    """``0.81 s``, ``4 min 10 s``, ``3 h 05 min``, ``2 d 04 h``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    for limit, unit, large, small in (
        (3600, 60, "min", "s"),
        (86400, 3600, "h", "min"),
        (float("inf"), 86400, "d", "h"),
    ):
        if seconds < limit:
            whole, rest = divmod(seconds, unit)
            part = {"s": 1, "min": 60, "h": 3600}[small]
            return f"{int(whole)} {large} {int(rest // part):02d} {small}"
    raise AssertionError


def rate_text(bytes_per_second: float) -> str:
    """``12.3 GB/s``: as links are rated, in powers of ten."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def count_text(count: float) -> str:
    """``7.62 B`` parameters, ``131,072`` tokens."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:,.0f}"
