"""The pictures of a report, each from the records of one run or of several to compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from oomb.monitor.observer import Record
from oomb.report.chart import Series, YAxis, line_chart, smoothed, stacked_areas, stacked_bars
from oomb.report.png import data_uri, map_png
from oomb.report.runs import Run
from oomb.report.scale import unit_of_bytes

SMOOTH_FROM = 40  # steps from which a smoothed line helps
BARS = 48  # of the breakdown over steps


def loss(runs: Sequence[Run]) -> str:
    series = []
    for number, run in enumerate(runs):
        color, prefix = 4 * number, f"{run.name}, " if len(runs) > 1 else ""
        values = run.column("loss")
        smooth = len(values) >= SMOOTH_FROM
        if smooth:
            series.append(Series("each step", run.steps, values, color, faint=True))
        name = prefix + ("training, smoothed" if smooth else "training")
        series.append(Series(name, run.steps, smoothed(values) if smooth else values, color))
        evals = run.metrics.evals
        if evals:
            x, y = [float(e["step"]) for e in evals], [e.get("loss") for e in evals]
            series.append(Series(prefix + "evaluation", x, y, color + 1, dots=True))
    return line_chart(series, "step", YAxis("loss, nats per token", from_zero=False))


def throughput(runs: Sequence[Run]) -> str:
    series = [
        Series(run.name, run.steps, run.column("tokens_per_second"), 4 * number)
        for number, run in enumerate(runs)
    ]
    return line_chart(series, "step", YAxis("tokens per second"))


def gradient_norm(runs: Sequence[Run]) -> str | None:
    """Before clipping, of each step; None where no run recorded it."""
    series = [
        Series(run.name, run.steps, run.column("grad_norm"), 4 * number)
        for number, run in enumerate(runs)
    ]
    if not any(value is not None for one in series for value in one.y):
        return None
    return line_chart(series, "step", YAxis("norm of the gradient, before clipping"))


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
    most = max(c["device_bytes"] + c["host_bytes"] for c in chunks)
    unit, name = unit_of_bytes(most)
    axis = YAxis(f"pages held, {name}", unit)
    borders = [float(b) for b in _phase_borders(chunks)]
    return step, stacked_areas(series, "chunks done, fill then sweep", axis, borders)


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
    unit, name = _unit_of_seconds(max(c["seconds"] for c in chunks))
    series = [
        Series("fill", x, fill, 2),
        Series("sweep", x, sweep, 0),
        Series("waited for copies", x, list(waits), 3),
    ]
    borders = [b + 0.5 for b in _phase_borders(chunks)]
    axis = YAxis(f"{name} per chunk", unit)
    return step, stacked_bars(series, "chunk, in the order they ran", axis, borders)


def traffic(run: Run) -> tuple[int, str] | None:
    """(step, chart) of what each chunk moved between the tiers; None where nothing moved."""
    found = run.chunks_of_a_step()
    if found is None or not any(c["h2d_bytes"] + c["d2h_bytes"] for c in found[1]):
        return None
    step, chunks = found
    x = [float(number + 1) for number in range(len(chunks))]
    most = max(c["h2d_bytes"] + c["d2h_bytes"] for c in chunks)
    unit, name = unit_of_bytes(most)
    series = [
        Series("to the device (prefetch)", x, [float(c["h2d_bytes"]) for c in chunks], 4),
        Series("to the host (offload)", x, [float(c["d2h_bytes"]) for c in chunks], 5),
    ]
    borders = [b + 0.5 for b in _phase_borders(chunks)]
    axis = YAxis(f"{name} per chunk", unit)
    return step, stacked_bars(series, "chunk, in the order they ran", axis, borders)


def breakdown(run: Run) -> str:
    """Seconds of each step by what they went to; long runs: the mean of several steps."""
    groups = _grouped(run.metrics.steps, BARS)
    x = [statistics.fmean(r["step"] for r in group) for group in groups]
    parts: dict[str, list[float | None]] = {}
    for group in groups:
        fill, sweep, waited, whole = (
            statistics.fmean(float(r.get(key) or 0.0) for r in group)
            for key in ("fill_seconds", "sweep_seconds", "exposed_copy_seconds", "seconds")
        )
        # Which phase waited is not recorded per step: both give in proportion.
        share = min(1.0, waited / (fill + sweep)) if fill + sweep > 0 else 0.0
        for name, value in (
            ("fill", fill * (1 - share)),
            ("sweep", sweep * (1 - share)),
            ("waited for copies", (fill + sweep) * share),
            ("optimizer, data, other", max(0.0, whole - fill - sweep)),
        ):
            parts.setdefault(name, []).append(value)
    colors = {"fill": 2, "sweep": 0, "waited for copies": 3, "optimizer, data, other": 6}
    series = [Series(name, x, values, colors[name]) for name, values in parts.items()]
    size = len(groups[0])
    label = "step" if size == 1 else f"step, means of {size}"
    unit, name = _unit_of_seconds(run.most("seconds") or 0.0)
    return stacked_bars(series, label, YAxis(f"{name} per step", unit))


def page_maps(run: Run) -> tuple[int, str] | None:
    """(step, figures) of the pages that each query block read, per layer."""
    selections = run.metrics.selections
    if not selections:
        return None
    step = max(selections)
    figures = []
    for record in sorted(selections[step], key=lambda r: int(r["layer"])):
        picture = data_uri(map_png(record["read"]))
        told = f"layer {record['layer']}: {_share_of_past(record['read']):.0f} % of earlier pages"
        figures.append(
            f'<figure><img src="{picture}" alt="{told}"><figcaption>{told}</figcaption></figure>'
        )
    return step, f'<div class="maps">{"".join(figures)}</div>'


def _phase_borders(chunks: Sequence[Record]) -> list[int]:
    """Numbers of chunks done where the phase changes."""
    return [
        number
        for number in range(1, len(chunks))
        if chunks[number]["phase"] != chunks[number - 1]["phase"]
    ]


def _grouped(records: Sequence[Record], most: int) -> list[Sequence[Record]]:
    size = -(-len(records) // most)
    return [records[begin : begin + size] for begin in range(0, len(records), size)]


def _share_of_past(rows: Sequence[Sequence[int]]) -> float:
    """Mean percentage below the diagonal of a map."""
    past = [percent for row in rows for percent in row[:-1]]
    return statistics.fmean(past) if past else 100.0


def _unit_of_seconds(most: float) -> tuple[float, str]:
    return (1e-3, "milliseconds") if most < 0.5 else (1.0, "seconds")
