"""Charts as inline SVG. Colours are classes of the page, so that light and dark both read well."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from oomb.report.scale import Scale, bounds, plain, ticks

WIDTH, HEIGHT = 520, 256
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 12, 40
NAMES = 18  # more above, for names of phases and limits
POINTS = 600  # of a line; more would not show
NAMED_FROM = 44  # width of a phase that has room for its name


@dataclass(frozen=True)
class Series:
    """Values over x; ``color`` is one of the page's classes c0 … c7. A None leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    dots: bool = False  # a mark at each value, on a thin line
    faint: bool = False


@dataclass(frozen=True)
class YAxis:
    """``label`` says what is drawn; ticks are in ``unit`` of the values' unit, named ``sign``."""

    label: str
    unit: float = 1.0
    sign: str = ""
    from_zero: bool = True


@dataclass(frozen=True)
class XAxis:
    """``label`` stands below; ``one`` is what a single place is called: step 12, chunk 3."""

    label: str
    one: str


@dataclass(frozen=True)
class Phase:
    """A stretch of the x axis that has a name, such as fill or sweep."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Limit:
    """A value that a series stays below: a dashed line with its name."""

    name: str
    value: float
    color: int


STEPS = XAxis("step", "step")


def line_chart(series: Sequence[Series], y: YAxis, x: XAxis = STEPS) -> str:
    """Lines over a common x axis; some with a mark at each value."""
    frame = _Frame([s for s in series if s.x], x, y)
    parts = [frame.grid(), *(frame.line(one) for one in series)]
    return frame.figure(parts, series)


def areas(
    series: Sequence[Series],
    y: YAxis,
    x: XAxis,
    phases: Sequence[Phase] = (),
    limits: Sequence[Limit] = (),
) -> str:
    """Lines with what lies below them filled, each from the base line."""
    reach = Series("", [series[0].x[0]] * len(limits), [limit.value for limit in limits])
    frame = _Frame([*series, *([reach] if limits else [])], x, y, named=bool(phases or limits))
    parts = [frame.grid(), *(frame.area(one) for one in series)]
    parts += [frame.limit(limit) for limit in limits]
    return frame.figure([*parts, frame.phases(phases)], series)


def stacked_bars(series: Sequence[Series], y: YAxis, x: XAxis, phases: Sequence[Phase] = ()) -> str:
    """One bar per x, its parts on top of each other."""
    stack = _stack(series)
    frame = _Frame(stack, x, y, bars=True, named=bool(phases))
    parts = [frame.grid()]
    floor: Sequence[float | None] = [0.0] * len(series[0].x)
    for one in stack:
        parts.append(frame.bars(one, floor))
        floor = one.y
    return frame.figure([*parts, frame.phases(phases)], series)


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Weighted means around each value, over about a tenth of the run.

    Weights fall by the same factor with each step of distance, before and after alike, so that a
    falling line does not lag behind.
    """
    keep = 1 - 1 / min(16.0, max(1.5, len(values) / 24))
    before = _sums(values, keep)
    after = _sums(values[::-1], keep)[::-1]
    return [
        None if v is None else (a + b - v) / (wa + wb - 1)
        for v, (a, wa), (b, wb) in zip(values, before, after, strict=True)
    ]


def _sums(values: Sequence[float | None], keep: float) -> list[tuple[float, float]]:
    """Of values up to each, the farther the less, and of their weights."""
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total, keep * weight
        if value is not None:
            total, weight = total + value, weight + 1
        sums.append((total, weight))
    return sums


def _stack(series: Sequence[Series]) -> list[Series]:
    sums = [0.0] * len(series[0].x)
    result = []
    for one in series:
        sums = [total + (value or 0.0) for total, value in zip(sums, one.y, strict=True)]
        result.append(Series(one.name, one.x, list(sums), one.color))
    return result


class _Frame:
    """The axes of a chart, and shapes in their coordinates."""

    def __init__(
        self,
        series: Sequence[Series],
        x: XAxis,
        y: YAxis,
        bars: bool = False,
        named: bool = False,
    ) -> None:
        xs = [x for s in series for x in s.x] or [0.0, 1.0]
        half = self._half = _spacing(xs) / 2 if bars else 0.0
        low, high = min(xs) - half, max(xs) + half
        if low == high:
            low, high = low - 0.5, high + 0.5
        self._x = Scale(low, high, LEFT, WIDTH - RIGHT)
        bottom, top = bounds((v for s in series for v in s.y), from_zero=y.from_zero)
        self._top = TOP + (NAMES if named else 0)
        self._y = Scale(bottom, top, HEIGHT - BOTTOM, self._top)
        self._x_axis, self._y_axis, self._bars = x, y, bars

    def grid(self) -> str:
        parts, unit = [], self._y_axis.unit
        for value in ticks(self._y.low, self._y.high, most=5, unit=unit):
            at = self._y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            text = plain(round(value / unit, 9))
            parts.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" class="end">{text}</text>')
        inner = (self._x.low + self._half, self._x.high - self._half)
        for value in ticks(*inner, most=6):
            if value == int(value):
                at, low = self._x(value), HEIGHT - BOTTOM + 17
                parts.append(f'<text x="{at:.1f}" y="{low}" class="mid">{value:,.0f}</text>')
        middle, label = (LEFT + WIDTH - RIGHT) / 2, escape(self._x_axis.label)
        parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" class="mid">{label}</text>')
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
        kind = "".join(
            f" {name}" for name, on in (("faint", series.faint), ("thin", series.dots)) if on
        )
        marks = self._marks(series) if series.dots or len(series.x) == 1 else ""
        return f'<path class="line s{series.color}{kind}" d="{"".join(pieces)}"/>{marks}'

    def area(self, series: Series) -> str:
        points = [
            f"{self._x(x):.1f} {self._y(y or 0):.1f}"
            for x, y in zip(series.x, series.y, strict=True)
        ]
        base, first, last = HEIGHT - BOTTOM, self._x(series.x[0]), self._x(series.x[-1])
        outline = f"{first:.1f} {base}L{'L'.join(points)}L{last:.1f} {base}"
        return (
            f'<path class="f{series.color} area" d="M{outline}Z"/>'
            f'<path class="line s{series.color}" d="M{"L".join(points)}"/>'
        )

    def bars(self, stacked: Series, floor: Sequence[float | None]) -> str:
        width = max(1.0, min(36.0, 0.82 * (self._x(2 * self._half) - self._x(0))))
        parts = []
        for x, top, base in zip(stacked.x, stacked.y, floor, strict=True):
            high, low = self._y(top or 0), self._y(base or 0)
            if low > high:
                parts.append(
                    f'<rect class="f{stacked.color}" x="{self._x(x) - width / 2:.1f}" '
                    f'y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}"/>'
                )
        return "".join(parts)

    def phases(self, phases: Sequence[Phase]) -> str:
        """Their names above, dashed lines between them."""
        parts = []
        for number, phase in enumerate(phases):
            begin, end = self._x(phase.begin), self._x(phase.end)
            if number:
                line = f"M{begin:.1f} {self._top - 14}V{HEIGHT - BOTTOM}"
                parts.append(f'<path class="border" d="{line}"/>')
            if end - begin >= NAMED_FROM:
                text = escape(phase.name)
                parts.append(f'<text x="{(begin + end) / 2:.1f}" y="12" class="mid">{text}</text>')
        return "".join(parts)

    def limit(self, limit: Limit) -> str:
        at, right = self._y(limit.value), WIDTH - RIGHT
        return (
            f'<path class="line limit s{limit.color}" d="M{LEFT} {at:.1f}H{right}"/>'
            f'<text x="{right - 2}" y="{at - 5:.1f}" class="end told">{escape(limit.name)}</text>'
        )

    def figure(self, parts: Sequence[str], series: Sequence[Series]) -> str:
        """The chart with its legend, and its values for the page's script."""
        base = f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
        marks = "".join(f'<circle class="f{one.color}" r="4"/>' for one in series)
        cursor = f'<g class="cursor"><path d=""/>{"" if self._bars else marks}</g>'
        label = escape(self._y_axis.label)
        values = escape(json.dumps(self._values(series), separators=(",", ":")))
        return (
            f'<p class="axis-label">{label}</p><div class="chart" data-values="{values}">'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" tabindex="0">'
            f"{''.join(parts)}{base}{cursor}</svg>"
            f'<div class="tip" role="status" hidden></div></div>{_legend(series)}'
        )

    def _marks(self, series: Series) -> str:
        return "".join(
            f'<circle class="f{series.color}" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="3"/>'
            for x, y in zip(series.x, series.y, strict=True)
            if y is not None and math.isfinite(y)
        )

    def _values(self, series: Sequence[Series]) -> dict[str, Any]:
        """What a reader may point at, in the units that are shown."""
        unit = self._y_axis.unit
        return {
            "x": [self._x.low, self._x.high, LEFT, WIDTH - RIGHT],
            "y": [self._y.low / unit, self._y.high / unit, HEIGHT - BOTTOM, self._top],
            "one": self._x_axis.one,
            "sign": self._y_axis.sign,
            "stacked": self._bars,
            "series": [
                {
                    "name": one.name,
                    "color": one.color,
                    "points": [
                        (round(x, 3), float(f"{y / unit:.5g}"))
                        for x, y in _thinned(one.x, one.y)
                        if y is not None and math.isfinite(y)
                    ],
                }
                for one in series
            ],
        }


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


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = "".join(
        f'<span><i class="{kind}"></i>{escape(name)}</span>'
        for name, kind in (
            (one.name, f"b{one.color}{' faint' if one.faint else ''}") for one in series
        )
    )
    return f'<div class="legend">{items}</div>'
