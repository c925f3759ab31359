"""The demo's picture: memory against length, and held-out loss of both runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oomb.cli.demo_memory import MemoryUse
from oomb.cli.demo_training import TrainingRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stay apart for the colour-blind (Okabe and Ito).
_STYLE = {
    "ordinary": ("ordinary training", "#D55E00", "s"),
    "checkpointing": ("ordinary, with checkpointing", "#E69F00", "^"),
    "oomb": ("OOMB", "#0072B2", "o"),
}
_MIB = 1 << 20

Measured = dict[str, dict[int, MemoryUse | None]]  # method -> tokens -> use; None: it stopped there
LeftOut = dict[str, list[int]]  # method -> lengths that there was no time for


def draw(
    path: Path,
    memory: Measured,
    left_out: LeftOut,
    budget: int,
    ordinary: TrainingRun,
    chunked: TrainingRun,
) -> None:
    """Save the picture as ``path``. What was left out is said in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    _draw_memory(left, memory, left_out, budget)
    left.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(int(tokens))))
    right.plot(ordinary.steps, ordinary.losses, color="#D55E00", linewidth=5, alpha=0.35)
    right.plot(chunked.steps, chunked.losses, color="#0072B2", linewidth=1.5, marker="o", ms=3.5)
    right.set(title="Held-out loss, same data and seeds", xlabel="steps", ylabel="nats per byte")
    right.legend(["ordinary training", "OOMB"], frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_memory(axes: Axes, memory: Measured, left_out: LeftOut, budget: int) -> None:
    limit = budget / _MIB
    for method, uses in memory.items():
        label, colour, marker = _STYLE[method]
        if left_out.get(method):
            label += f"\n({', '.join(map(_short, left_out[method]))} left out: no time)"
        held = {tokens: use.peak / _MIB for tokens, use in uses.items() if use is not None}
        axes.plot(list(held), list(held.values()), color=colour, marker=marker, label=label)
        for stopped in (tokens for tokens, use in uses.items() if use is None):
            ends = _reaches(limit, list(held.items())[-2:], stopped)
            axes.plot([*held, ends][-2:], [*held.values(), limit][-2:], color=colour, ls=":")
            axes.plot([ends], [limit], color=colour, marker="x", ms=9, mew=2)
    pages = {tokens: use.pages / _MIB for tokens, use in memory["oomb"].items() if use}
    axes.plot(
        list(pages),
        list(pages.values()),
        color=_STYLE["oomb"][1],
        linestyle="--",
        linewidth=1,
        label="of which pages: keys, values, their gradients",
    )
    lengths = sorted({tokens for uses in memory.values() for tokens in uses})
    axes.axhline(limit, color="black", linewidth=0.8)
    axes.annotate(
        f"limit {limit:,.0f} MiB",
        (lengths[-1], limit),
        (0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    axes.set(
        title="Peak memory of one step",
        xlabel="tokens in the sequence",
        ylabel="MiB beyond the model",
        xticks=lengths,
        ylim=(0, 1.12 * limit),
    )
    axes.legend(frameon=False, fontsize=8, loc="center right")


def _reaches(limit: float, last: list[tuple[int, float]], stopped: int) -> float:
    """Tokens at which a line that goes on as its last two points do is at the limit.

    At most ``stopped``, the length that did not fit; that length where one point tells no slope.
    """
    if len(last) < 2 or last[1][1] <= last[0][1]:
        return stopped
    (x0, y0), (x1, y1) = last
    return min(stopped, x1 + (limit - y1) * (x1 - x0) / (y1 - y0))


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
