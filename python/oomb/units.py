"""Numbers as people read and write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")
_MOST_BYTES = 2**60


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


def parse_size(argument: str, value: int | str | None) -> int | None:
    """Bytes of a memory size: an int, or text such as ``"40GiB"``. None stays None.

    Raises:
        ValueError: the text is no number with a unit of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, or
            the size is not in 1 ... 2**60.
    """
    if value is None:
        return None
    size = _size_in_bytes(value)
    if size is None or not 0 < size <= _MOST_BYTES:
        raise ValueError(
            f"{argument}: expected bytes or a size such as '40GiB' or '40GB', got {value!r}"
        )
    return size


def _size_in_bytes(value: int | str) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2].upper()])
