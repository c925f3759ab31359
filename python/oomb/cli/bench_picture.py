"""The picture of ``oomb bench step``: seconds and memory against length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oomb.cli.bench_rivals import memory_of
from oomb.cli.bench_step import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stay apart for the colour-blind (Okabe and Ito).
_STYLE = {
    "OOMB": ("#0072B2", "o"),
    "ordinary": ("#D55E00", "s"),
    "tuned": ("#E69F00", "^"),
    "tuned-kept": ("#009E73", "v"),
}
_GIB = 1 << 30


def draw(path: Path, rows: list[Row], rivals: list[Row], title: str) -> None:
    """Save the picture as ``path``; a cross marks a length that does not fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    lines = {"OOMB": rows}
    for rival in rivals:
        lines.setdefault(rival["name"], []).append(rival)
    for name, line in lines.items():
        _draw_seconds(left, name, line)
        _draw_memory(right, name, line)
    _draw_pools(right, rows)
    left.set(title=f"{title}: one step", ylabel="seconds", yscale="log")
    right.set(title="Memory beyond the parameters", ylabel="GiB")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        lengths = sorted({row["tokens"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_short(length) for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("tokens in the sequence")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_seconds(axes: Axes, name: str, line: list[Row]) -> None:
    colour, marker = _STYLE[name]
    best: dict[int, float] = {}
    for row in line:
        if row.get("fits", True):
            best[row["tokens"]] = min(row["seconds"], best.get(row["tokens"], row["seconds"]))
    axes.plot(list(best), list(best.values()), color=colour, marker=marker, label=name)
    for row in line:
        if not row.get("fits", True):
            height = max(best.values(), default=1.0)
            axes.plot([row["tokens"]], [height], color=colour, marker="x", ms=9, mew=2)


def _draw_memory(axes: Axes, name: str, line: list[Row]) -> None:
    colour, marker = _STYLE[name]
    measured = [row for row in line if "torch_peak_bytes" in row]  # not on a CPU
    held = {row["tokens"]: memory_of(row) / _GIB for row in measured}
    label = f"{name}, GPU and host"
    if held:
        axes.plot(list(held), list(held.values()), color=colour, marker=marker, label=label)


def _draw_pools(axes: Axes, rows: list[Row]) -> None:
    for place, style in (("device", "--"), ("host", ":")):
        held = {row["tokens"]: row[f"{place}_peak_bytes"] / _GIB for row in rows}
        colour, label = _STYLE["OOMB"][0], f"of which pages, {place} tier"
        axes.plot(list(held), list(held.values()), style, color=colour, linewidth=1, label=label)


def _short(tokens: int) -> str:
    if tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
