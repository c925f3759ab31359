"""Axes: round tick values, and units that fit them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Scale:
    """A linear map of [low, high] to pixels [begin, end]."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.begin + (value - self.low) / (span or 1.0) * (self.end - self.begin)


def ticks(low: float, high: float, most: int = 5, unit: float = 1.0) -> list[float]:
    """Multiples of 1, 2 or 5 · 10^n units within [low, high], at most ``most`` + 1."""
    low, high = low / unit, high / unit
    if not high > low:
        return [low * unit]
    step = 10 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step * unit for number in range(first, last + 1)]


def bounds(values: Iterable[float | None], *, from_zero: bool) -> tuple[float, float]:
    """Limits of an axis that shows all values, with some air."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    air = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return (0.0 if from_zero else low - air), high + air


def unit_of_bytes(most: float) -> tuple[float, str]:
    """The binary unit in which ``most`` bytes have at least one digit before the point."""
    power = 0
    while most >= 1024 ** (power + 1) and power + 1 < len(_BINARY):
        power += 1
    return float(1024**power), _BINARY[power]


def power_of_ten(most: float) -> tuple[float, str]:
    """The unit in which ``most`` has one digit before the point, and its sign: 0.0005, ``10⁻⁴``.

    1 and no sign where numbers are easily read as they are.
    """
    if 0.01 <= most < 1e4:
        return 1.0, ""
    power = math.floor(math.log10(most) + 0.01)  # 0.00099 is 0.99 · 10⁻³
    return 10.0**power, "10" + str(power).translate(_RAISED)


def plain(value: float) -> str:
    """A tick without needless digits: 0, 0.25, 1,000."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
