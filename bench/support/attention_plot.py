"""docs/images/attention.png from the results of both grids; see bench/attention.py --plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.record import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "attention.png"
MIDDLE = {
    "chunk": 4096,
    "past": 131072,
    "query_heads": 28,
    "kv_heads": 4,
    "head_dim": 128,
    "page_size": 128,
}
LABELS = {
    "oomb": "oomb",
    "oomb_fused": "oomb, dQ in any order",
    "cudnn": "cuDNN, contiguous",
    "flex": "FlexAttention, contiguous",
}
# Colours that stay apart for the colour-blind (Okabe and Ito).
COLORS = {"oomb": "#0072B2", "oomb_fused": "#56B4E9", "cudnn": "#D55E00", "flex": "#E69F00"}
Row = dict[str, Any]


def newest(kind: str) -> Row:
    """The latest grid of ``kind`` in bench/results, by the date in its name."""
    paths = RESULTS.glob(f"attention-{kind}-grid-[!s]*.json")
    return json.loads(max(paths, key=lambda path: path.stem[-10:]).read_text())


def along(rows: list[Row], axis: str, dense: bool | None) -> list[Row]:
    """Rows that differ from the middle in ``axis`` alone: dense, 64 pages, or (None) any pages."""
    kept = []
    for row in rows:
        if any(row[key] != value for key, value in MIDDLE.items() if key != axis):
            continue
        if row["budget"] is not None if dense is None else row["budget"] == (None if dense else 64):
            kept.append(row)
    return sorted(kept, key=lambda row: row[axis])


def highest(rows: list[Row]) -> float:
    return max(row.get(f"{name}_tflops", 0.0) for row in rows for name in LABELS)


def draw(axes: Axes, rows: list[Row], axis: str, style: str, note: str) -> None:
    for name, label in LABELS.items():
        points = [(row[axis], row[f"{name}_tflops"]) for row in rows if f"{name}_tflops" in row]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, style, color=COLORS[name], label=f"{label}{note}", markersize=4)


def plot() -> None:
    """Two rows, forward and backward: TFLOP/s over chunk, past, budget and query heads.

    Raises:
        ValueError: bench/results has no grid of one of the two.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    kinds = ("forward", "backward")
    figure, panels = pyplot.subplots(2, 4, figsize=(13, 6.2), sharey="row", layout="constrained")
    titles = {
        "chunk": "chunk, tokens",
        "past": "past, tokens",
        "budget": "pages per block of queries",
        "query_heads": "query heads (4 key/value heads)",
    }
    for kind, row_of_panels in zip(kinds, panels, strict=True):
        result = newest(kind)
        for (axis, title), axes in zip(titles.items(), row_of_panels, strict=True):
            if axis == "budget":
                lines = [(along(result["rows"], axis, None), "--s", ", pages")]
            else:
                lines = [
                    (along(result["rows"], axis, True), "-o", ", dense"),
                    (along(result["rows"], axis, False), "--s", ", 64 pages"),
                ]
            for rows, style, note in lines:
                draw(axes, rows, axis, style, note)
            if axis == "past":
                axes.set_xscale("symlog", base=2, linthresh=8192)
            elif axis != "query_heads":
                axes.set_xscale("log", base=2)
            ticks = sorted({row[axis] for rows, _, _ in lines for row in rows})
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(int(x))))
            axes.grid(alpha=0.3)
            axes.set_xlabel(title)
        row_of_panels[0].set_ylim(0, 1.05 * highest(result["rows"]))  # of the whole row of panels
        row_of_panels[0].set_ylabel(f"{kind}, TFLOP/s")
    handles = {
        label: handle
        for axes in panels[1]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if not label.endswith(", pages")
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Attention on one {result['device']}: bf16, 28 query heads of 128, chunk 4096")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    print(f"wrote {PICTURE}")


def short(tokens: int) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)
