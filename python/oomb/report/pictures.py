"""The pictures of a report, each from the records of one run or of several to compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TypeVar

from oomb.monitor.observer import Record
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
from oomb.report.png import data_uri, map_png
from oomb.report.runs import Run
from oomb.report.scale import power_of_ten, unit_of_bytes
from oomb.units import bytes_text

BARS = 48  # of the breakdown over steps
SMOOTH_FROM = 4  # steps; fewer have no trend
LIMIT_DRAWN = 2.5  # times the most that was held; a limit farther off is told below

_T = TypeVar("_T")

_CHUNKS = XAxis("chunk, in the order they ran", "chunk")


def color_of(run: int) -> int:
    """Of the run's lines, by its number in a comparison; the next three are its evaluations'."""
    return 4 * run


def loss(runs: Sequence[Run]) -> str:
    series = []
    for number, run in enumerate(runs):
        prefix, color = f"{run.name}, " if len(runs) > 1 else "", color_of(number)
        series += _trend(run, "loss", color, prefix + "training", f"{prefix}each step")
        for place, (of_set, evals) in enumerate(run.evaluations().items()):
            x, y = [float(e["step"]) for e in evals], [e.get("loss") for e in evals]
            name = prefix + (f"evaluation, {of_set}" if of_set else "evaluation")
            series.append(Series(name, x, y, color + 1 + place % 3, dots=True))
    return line_chart(series, YAxis("nats per token", from_zero=False))


def throughput(runs: Sequence[Run]) -> str:
    series = []
    for number, run in enumerate(runs):
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        name = f"{prefix}tokens per second"
        series += _trend(run, "tokens_per_second", color_of(number), name, f"{prefix}each step")
    return line_chart(series, YAxis("tokens per second"))


def gradient_norm(runs: Sequence[Run]) -> str | None:
    """Before clipping, of each step; None where no run recorded it."""
    if not any(run.has("grad_norm") for run in runs):
        return None
    series = []
    for number, run in enumerate(runs):
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        name = f"{prefix}norm"
        series += _trend(run, "grad_norm", color_of(number), name, f"{prefix}each step")
    return line_chart(series, YAxis("norm of the gradient, before clipping"))


def learning_rate(runs: Sequence[Run]) -> str | None:
    """Of each step; None where no run recorded it."""
    most = max((run.most("learning_rate") or 0.0 for run in runs), default=0.0)
    if not most:
        return None
    series = [
        Series(run.name, run.steps, run.column("learning_rate"), color_of(number))
        for number, run in enumerate(runs)
    ]
    unit, sign = power_of_ten(most)
    return line_chart(series, YAxis(f"learning rate{sign and f', in {sign}'}", unit, sign))


def _trend(run: Run, key: str, color: int, name: str, each: str) -> list[Series]:
    """Values of each step, faint behind their smoothed line."""
    values = run.column(key)
    if len(values) < SMOOTH_FROM:
        return [Series(name, run.steps, values, color)]
    return [
        Series(each, run.steps, values, color, faint=True),
        Series(f"{name}, smoothed", run.steps, smoothed(values), color),
    ]


def memory_timeline(run: Run) -> tuple[int, str] | None:
    """(step, chart) of what each tier holds over the chunks of a step."""
    found = run.chunks_of_a_step()
    if found is None:
        return None
    step, chunks = found
    # A point per chunk border: nothing is held before the first chunk.
    x = [float(number) for number in range(len(chunks) + 1)]
    series = [
        Series(name, x, [0.0, *(float(c[key]) for c in chunks)], color)
        for name, key, color in (
            ("device tier", "device_bytes", 0),
            ("host tier", "host_bytes", 1),
        )
        if key == "device_bytes" or any(c[key] for c in chunks)
    ]
    most = max(value or 0.0 for one in series for value in one.y)
    unit, sign = unit_of_bytes(most)
    limits = [
        Limit(f"{one.name}, limit {bytes_text(limit)}", float(limit), one.color)
        for one in series
        if (limit := run.tier_limit(one.name.split()[0])) is not None
    ]
    drawn = [limit for limit in limits if limit.value <= LIMIT_DRAWN * most]
    told = "; ".join(limit.name for limit in limits if limit not in drawn)
    chart = areas(
        series,
        YAxis(f"{sign} of pages in each tier", unit, sign),
        XAxis("chunks done", "chunks done:"),
        _phases(chunks),
        drawn,
    )
    return step, chart + (
        f'<p class="note">Beyond the picture: {escape(told)}.</p>' if told else ""
    )


def chunk_times(run: Run) -> tuple[int, str] | None:
    """(step, chart) of where the time of each chunk went."""
    found = run.chunks_of_a_step()
    if found is None:
        return None
    step, chunks = found
    x = [float(number + 1) for number in range(len(chunks))]
    waits = [min(float(c["exposed_copy_seconds"]), float(c["seconds"])) for c in chunks]
    busy = [float(c["seconds"]) - wait for c, wait in zip(chunks, waits, strict=True)]
    fill = [b if c["phase"] == "fill" else None for b, c in zip(busy, chunks, strict=True)]
    sweep = [b if c["phase"] == "sweep" else None for b, c in zip(busy, chunks, strict=True)]
    axis = _seconds_axis("per chunk", max(c["seconds"] for c in chunks))
    series = [
        Series("fill", x, fill, 2),
        Series("sweep", x, sweep, 0),
        Series("waited for copies", x, list(waits), 3),
    ]
    return step, stacked_bars(series, axis, _CHUNKS, _phases(chunks, 0.5))


def traffic(run: Run) -> tuple[int, str] | None:
    """(step, chart) of what each chunk moved between the tiers; None where nothing moved."""
    found = run.chunks_of_a_step()
    if found is None or not any(c["h2d_bytes"] + c["d2h_bytes"] for c in found[1]):
        return None
    step, chunks = found
    x = [float(number + 1) for number in range(len(chunks))]
    most = max(c["h2d_bytes"] + c["d2h_bytes"] for c in chunks)
    unit, sign = unit_of_bytes(most)
    series = [
        Series("to the device (prefetch)", x, [float(c["h2d_bytes"]) for c in chunks], 4),
        Series("to the host (offload)", x, [float(c["d2h_bytes"]) for c in chunks], 5),
    ]
    axis = YAxis(f"{sign} moved per chunk", unit, sign)
    return step, stacked_bars(series, axis, _CHUNKS, _phases(chunks, 0.5))


def breakdown(run: Run) -> str:
    """Seconds of each step by what they went to; long runs: the mean of several steps."""
    groups = _grouped(run.steps, BARS)
    x = [statistics.fmean(group) for group in groups]
    keys = ("fill_seconds", "sweep_seconds", "exposed_copy_seconds", "data_seconds", "seconds")
    means = [
        [statistics.fmean(value or 0.0 for value in group) for group in _grouped(column, BARS)]
        for column in map(run.column, keys)
    ]
    parts: dict[str, list[float | None]] = {}
    for fill, sweep, waited, data, whole in zip(*means, strict=True):
        # Which phase waited is not recorded per step: both give in proportion.
        share = min(1.0, waited / (fill + sweep)) if fill + sweep > 0 else 0.0
        for name, value in (
            ("fill", fill * (1 - share)),
            ("sweep", sweep * (1 - share)),
            ("waited for copies", (fill + sweep) * share),
            ("waited for data", data),
            ("optimizer, other", max(0.0, whole - fill - sweep - data)),
        ):
            parts.setdefault(name, []).append(value)
    colors = {"fill": 2, "sweep": 0, "waited for copies": 3, "waited for data": 1}
    series = [Series(name, x, values, colors.get(name, 6)) for name, values in parts.items()]
    size = len(groups[0])
    label = "step" if size == 1 else f"step, means of {size}"
    one = "step" if size == 1 else "around step"
    axis = _seconds_axis("per step", run.most("seconds") or 0.0)
    return stacked_bars(series, axis, XAxis(label, one))


def page_maps(run: Run) -> tuple[int, str] | None:
    """(step, figures) of the pages that each query block read, per layer."""
    found = run.maps_of_a_step()
    if found is None:
        return None
    step, selections = found
    figures = []
    for record in sorted(selections, key=lambda r: int(r["layer"])):
        picture = data_uri(map_png(record["read"]))
        told = f"layer {record['layer']}: {_share_of_past(record['read']):.0f} % of earlier pages"
        figures.append(
            f'<figure><img src="{picture}" alt="{told}"><figcaption>{told}</figcaption></figure>'
        )
    return step, f'<div class="maps">{"".join(figures)}</div>'


def _phases(chunks: Sequence[Record], shift: float = 0.0) -> list[Phase]:
    """Stretches of chunks of one phase, from the number done before to the number done after."""
    borders = [
        number
        for number in range(1, len(chunks))
        if chunks[number]["phase"] != chunks[number - 1]["phase"]
    ]
    return [
        Phase(chunks[begin]["phase"], begin + shift, end + shift)
        for begin, end in pairwise([0, *borders, len(chunks)])
    ]


def _grouped(values: Sequence[_T], most: int) -> list[Sequence[_T]]:
    size = -(-len(values) // most)
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def _share_of_past(rows: Sequence[Sequence[int]]) -> float:
    """Mean percentage below the diagonal of a map."""
    past = [percent for row in rows for percent in row[:-1]]
    return statistics.fmean(past) if past else 100.0


def _seconds_axis(what: str, most: float) -> YAxis:
    if most < 0.5:
        return YAxis(f"milliseconds {what}", 1e-3, "ms")
    return YAxis(f"seconds {what}", 1.0, "s")
