"""A chart: its lines, areas and bars lie where its axes say."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

from oomb.report.chart import (
    Limit,
    Phase,
    Series,
    XAxis,
    YAxis,
    areas,
    line_chart,
    smoothed,
    stacked_bars,
)
from oomb.report.scale import ticks

from .drawn import points, svgs

TOP, BASE = 12, 216  # of every chart's frame


def line_of(text: str, color: int) -> str:
    (svg,) = svgs(text)
    (path,) = (p for p in svg.iter("path") if p.get("class", "").startswith(f"line s{color}"))
    return path.get("d", "")


@pytest.mark.parametrize("from_zero", [False, True])
def test_line_is_where_its_axis_says(from_zero: bool) -> None:
    x, y = [1.0, 2.0, 4.0], [10.0, 40.0, 20.0]
    text = line_chart([Series("a", x, y)], YAxis("loss", from_zero=from_zero))
    (svg,) = svgs(text)
    axis = {float(t.text or ""): float(t.get("y", "")) - 4 for t in svg.iter("text")
            if t.get("class") == "end"}  # fmt: skip
    (low, at_low), *_, (high, at_high) = sorted(axis.items())
    for (_, height), value in zip(points(line_of(text, 0)), y, strict=True):
        expected = at_low + (value - low) / (high - low) * (at_high - at_low)
        assert abs(height - expected) < 0.2
    assert all(TOP <= height <= BASE for _, height in points(line_of(text, 0)))
    places = [place for place, _ in points(line_of(text, 0))]
    assert abs((places[2] - places[1]) - 2 * (places[1] - places[0])) < 0.2


def test_missing_value_parts_the_line() -> None:
    series = Series("a", [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, None, 2.0, 1.0])
    path = line_of(line_chart([series], YAxis("loss")), 0)
    assert path.count("M") == 2 and len(points(path)) == 4


def test_areas_start_from_the_base_line_and_end_below_their_limit() -> None:
    x = [0.0, 1.0]
    parts = [Series("a", x, [1.0, 3.0], 0), Series("b", x, [2.0, 1.0], 1)]
    text = areas(parts, YAxis("bytes"), XAxis("chunks", "chunk"), limits=[Limit("a's", 4.0, 0)])
    lower, upper = points(line_of(text, 0)), points(line_of(text, 1))
    one = BASE - lower[0][1]  # the height of 1
    assert abs((BASE - lower[1][1]) - 3 * one) < 0.3
    assert abs((BASE - upper[0][1]) - 2 * one) < 0.3
    (limit,) = (p.get("d", "") for p in svgs(text)[0].iter("path") if "limit" in p.get("class", ""))
    assert abs((BASE - float(re.findall(r"[\d.]+", limit)[1])) - 4 * one) < 0.3


def test_bars_stand_on_each_other() -> None:
    parts = [Series("a", [1.0, 2.0], [1.0, 3.0], 0), Series("b", [1.0, 2.0], [2.0, 0.0], 1)]
    text = stacked_bars(parts, YAxis("seconds"), XAxis("chunk", "chunk"))
    bars = [
        (bar.get("class"), float(bar.get("y", "")), float(bar.get("height", "")))
        for bar in svgs(text)[0].iter("rect")
    ]
    (_, first, one), (_, third, three), (_, second, two) = bars
    assert [kind for kind, _, _ in bars] == ["f0", "f0", "f1"]
    assert abs(three - 3 * one) < 0.3 and abs(two - 2 * one) < 0.3
    assert abs(second + two - first) < 0.2 and abs(first + one - BASE) < 0.2
    assert abs(third + three - BASE) < 0.2


def test_phases_are_named_where_they_lie() -> None:
    series = Series("a", [0.0, 10.0], [1.0, 1.0])
    phases = [Phase("fill", 0.0, 4.0), Phase("sweep", 4.0, 9.9), Phase("narrow", 9.9, 10.0)]
    (svg,) = svgs(areas([series], YAxis("bytes"), XAxis("chunks", "chunk"), phases))
    names = {t.text: float(t.get("x", "")) for t in svg.iter("text")}
    borders = [
        float(re.findall(r"[\d.]+", p.get("d", ""))[0])
        for p in svg.iter("path")
        if p.get("class") == "border"
    ]
    assert len(borders) == 2 and "narrow" not in names
    assert names["fill"] < borders[0] < names["sweep"] < borders[1]


def test_values_of_a_chart_are_those_drawn() -> None:
    """What the page's script tells at a place; in the unit of the axis."""
    x, y = [1.0, 2.0, 3.0], [1024.0, None, 3072.0]
    text = line_chart([Series("a<", x, y)], YAxis("held", unit=1024.0, sign="KiB"))
    told = values(text)
    assert told["series"] == [{"name": "a<", "color": 0, "points": [[1.0, 1.0], [3.0, 3.0]]}]
    assert told["sign"] == "KiB" and told["one"] == "step"
    for (at, height), (place, value) in zip(
        points(line_of(text, 0)), told["series"][0]["points"], strict=True
    ):
        for axis, number, drawn in (("x", place, at), ("y", value, height)):
            low, high, begin, end = told[axis]
            assert abs(begin + (number - low) / (high - low) * (end - begin) - drawn) < 0.1


def values(text: str) -> dict[str, Any]:
    (attribute,) = re.findall(r'data-values="([^"]*)"', text)
    found = json.loads(html.unescape(attribute))
    assert isinstance(found, dict)
    return found


def test_smoothing_is_of_both_sides_and_from_the_first_step() -> None:
    assert smoothed([2.0] * 9) == pytest.approx([2.0] * 9)
    assert smoothed([1.0, None, 1.0]) == [1.0, None, 1.0]
    slope = [float(n) for n in range(200)]
    middle = slice(90, 110)
    assert smoothed(slope)[middle] == pytest.approx(slope[middle], abs=0.1)  # no lag
    noise = [(-1.0) ** n for n in range(40)]
    assert max(abs(v or 0.0) for v in smoothed(noise)) < 0.6
    assert smoothed([]) == []


def test_long_lines_keep_their_extremes() -> None:
    x = [float(n) for n in range(50_000)]
    y: list[float | None] = [1.0] * 50_000
    y[31_234], y[777] = 9.0, None
    path = line_of(line_chart([Series("a", x, y)], YAxis("loss")), 0)
    heights = [height for _, height in points(path)]
    assert len(heights) < 2000
    assert sum(height < max(heights) - 50 for height in heights) == 1


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (2.1, 2.2), (0, 1e12), (-3, 5)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    values = ticks(low, high, most=6)
    assert 2 <= len(values) <= 7
    assert low - 1e-9 <= values[0] and values[-1] <= high * (1 + 1e-9)
    step = values[1] - values[0]
    assert f"{step:.0e}"[0] in "125" and abs(values[0] / step - round(values[0] / step)) < 1e-6
