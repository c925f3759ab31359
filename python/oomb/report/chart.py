"""Charts as inline SVG. Colours are classes of the page, so that light and dark both read well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from oomb.report.scale import Scale, bounds, plain, ticks

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 40
POINTS = 600  # of a line; more would not show


@dataclass(frozen=True)
class Series:
    """Values over x; ``color`` is one of the page's classes c0 … c7. A None leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    dots: bool = False  # marks instead of a line
    faint: bool = False


@dataclass(frozen=True)
class YAxis:
    label: str
    unit: float = 1.0  # ticks are in this many of the values' unit
    from_zero: bool = True


def line_chart(series: Sequence[Series], x_label: str, y: YAxis) -> str:
    """Lines and marks over a common x axis."""
    frame = _Frame([s for s in series if s.x], y)
    parts = [frame.grid(x_label)]
    for one in series:
        parts.append(frame.marks(one) if one.dots else frame.line(one))
    return frame.svg(parts) + _legend([(s.name, s.color) for s in series if not s.faint])


def stacked_areas(
    series: Sequence[Series], x_label: str, y: YAxis, borders: Sequence[float] = ()
) -> str:
    """Areas on top of each other; ``borders``: x of dashed lines, between phases."""
    frame = _Frame(_stack(series), y)
    parts = [frame.grid(x_label)]
    floor: Sequence[float | None] = [0.0] * len(series[0].x)
    for one in _stack(series):
        parts.append(frame.area(one, floor))
        floor = one.y
    parts.extend(frame.vertical(border) for border in borders)
    return frame.svg(parts) + _legend([(s.name, s.color) for s in series])


def stacked_bars(
    series: Sequence[Series], x_label: str, y: YAxis, borders: Sequence[float] = ()
) -> str:
    """One bar per x, its parts on top of each other."""
    frame = _Frame(_stack(series), y, bars=True)
    parts = [frame.grid(x_label)]
    floor: Sequence[float | None] = [0.0] * len(series[0].x)
    for one, own in zip(_stack(series), series, strict=True):
        parts.append(frame.bars(one, floor, own))
        floor = one.y
    parts.extend(frame.vertical(border) for border in borders)
    return frame.svg(parts) + _legend([(s.name, s.color) for s in series])


def smoothed(values: Sequence[float | None], share: float = 0.1) -> list[float | None]:
    """Exponential mean; its first values are means of what there is."""
    total, weight = 0.0, 0.0
    result: list[float | None] = []
    for value in values:
        if value is None:
            result.append(None)
            continue
        total, weight = (1 - share) * total + share * value, (1 - share) * weight + share
        result.append(total / weight)
    return result


def _stack(series: Sequence[Series]) -> list[Series]:
    sums = [0.0] * len(series[0].x)
    result = []
    for one in series:
        sums = [total + (value or 0.0) for total, value in zip(sums, one.y, strict=True)]
        result.append(Series(one.name, one.x, list(sums), one.color))
    return result


class _Frame:
    """The axes of a chart, and shapes in their coordinates."""

    def __init__(self, series: Sequence[Series], y: YAxis, bars: bool = False) -> None:
        xs = [x for s in series for x in s.x] or [0.0, 1.0]
        half = self._half = _spacing(xs) / 2 if bars else 0.0
        low, high = min(xs) - half, max(xs) + half
        if low == high:
            low, high = low - 0.5, high + 0.5
        self._x = Scale(low, high, LEFT, WIDTH - RIGHT)
        bottom, top = bounds((v for s in series for v in s.y), from_zero=y.from_zero)
        self._y = Scale(bottom, top, HEIGHT - BOTTOM, TOP)
        self._axis = y

    def grid(self, x_label: str) -> str:
        parts = []
        for value in ticks(self._y.low, self._y.high, most=6, unit=self._axis.unit):
            at = self._y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            text = plain(round(value / self._axis.unit, 9))
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" class="end">{text}</text>')
        inner = (self._x.low + self._half, self._x.high - self._half)
        for value in ticks(*inner, most=8):
            if value == int(value):
                at = self._x(value)
                low = HEIGHT - BOTTOM + 18
                parts.append(f'<text x="{at:.1f}" y="{low}" class="mid">{value:,.0f}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 4}" class="mid label">{escape(x_label)}</text>'
        )
        turn = f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
        label = escape(self._axis.label)
        parts.append(f'<text transform="{turn}" class="mid label">{label}</text>')
        return "".join(parts)

    def line(self, series: Series) -> str:
        pieces: list[str] = []
        pen = "M"
        for x, y in _thinned(series.x, series.y):
            if y is None or not math.isfinite(y):
                pen = "M"
                continue
            pieces.append(f"{pen}{self._x(x):.1f} {self._y(y):.1f}")
            pen = "L"
        faint = " faint" if series.faint else ""
        alone = self.marks(series) if len(series.x) == 1 else ""
        return f'<path class="line s{series.color}{faint}" d="{"".join(pieces)}"/>' + alone

    def marks(self, series: Series) -> str:
        parts = []
        for x, y in zip(series.x, series.y, strict=True):
            if y is not None and math.isfinite(y):
                at = f'cx="{self._x(x):.1f}" cy="{self._y(y):.1f}"'
                told = f"{escape(series.name)}: {y / self._axis.unit:,.4g} at {x:,.0f}"
                parts.append(
                    f'<circle class="f{series.color}" {at} r="3.5"><title>{told}</title></circle>'
                )
        return "".join(parts)

    def area(self, series: Series, floor: Sequence[float | None]) -> str:
        upper = [
            f"{self._x(x):.1f} {self._y(y or 0):.1f}"
            for x, y in zip(series.x, series.y, strict=True)
        ]
        lower = [
            f"{self._x(x):.1f} {self._y(y or 0):.1f}" for x, y in zip(series.x, floor, strict=True)
        ]
        outline = "L".join([*upper, *reversed(lower)])
        return (
            f'<path class="f{series.color} area" d="M{outline}Z"/>'
            f'<path class="line s{series.color}" d="M{"L".join(upper)}"/>'
        )

    def bars(self, stacked: Series, floor: Sequence[float | None], own: Series) -> str:
        width = max(1.0, min(36.0, 0.82 * (self._x(2 * self._half) - self._x(0))))
        parts = []
        for x, top, base, value in zip(stacked.x, stacked.y, floor, own.y, strict=True):
            if not value:
                continue
            high, low = self._y(top or 0), self._y(base or 0)
            told = f"{escape(own.name)}: {value / self._axis.unit:,.4g}"
            parts.append(
                f'<rect class="f{own.color}" x="{self._x(x) - width / 2:.1f}" y="{high:.1f}" '
                f'width="{width:.1f}" height="{max(0.0, low - high):.1f}">'
                f"<title>{told}</title></rect>"
            )
        return "".join(parts)

    def vertical(self, x: float) -> str:
        return f'<path class="border" d="M{self._x(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'

    def svg(self, parts: Sequence[str]) -> str:
        base = f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
        label = escape(self._axis.label)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
            f"{''.join(parts)}{base}</svg>"
        )


def _thinned(x: Sequence[float], y: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """At most about POINTS points, the smallest and largest of each stretch among them."""
    points = list(zip(x, y, strict=True))
    if len(points) <= POINTS:
        return points
    stretch = -(-2 * len(points) // POINTS)
    kept = []
    for begin in range(0, len(points), stretch):
        part = [p for p in points[begin : begin + stretch] if p[1] is not None]
        ends = {min(part, key=_height), max(part, key=_height)} if part else set()
        kept.extend(sorted(ends))
    return kept


def _spacing(x: Sequence[float]) -> float:
    """Least distance between neighbours."""
    places = sorted(set(x))
    return min((b - a for a, b in pairwise(places)), default=1.0)


def _height(point: tuple[float, float | None]) -> float:
    return point[1] if point[1] is not None else 0.0


def _legend(names: Sequence[tuple[str, int]]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(f'<span><i class="b{color}"></i>{escape(name)}</span>' for name, color in names)
    return f'<div class="legend">{items}</div>'
