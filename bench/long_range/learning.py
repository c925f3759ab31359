"""A picture of learning: the share of needles that a model finds, by the steps that it has made."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from .training import UNTRAINED

# Colours that stay apart for the colour-blind (Okabe and Ito), and dashes for who has none left.
_COLOURS = ("#0072B2", "#000000", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")


def draw_learning(path: Path, runs: list[dict[str, Any]], enough: float) -> None:
    """A panel for each length at which several methods trained, a line for each of them.

    Lines are means over seeds, bands their ranges. A step is as many tokens for every method.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found: dict[int, dict[str, list[dict[float, float]]]] = {}  # length, method, seed: by step
    for run in runs:
        for piece in run["pieces"].values():
            looked = {look["step"]: look["needle"] for look in piece.get("probes", [])}
            by_method = found.setdefault(piece["length"], {})
            by_method.setdefault(piece["method"], []).append(looked)
    found = {length: each for length, each in found.items() if UNTRAINED in each}
    if not found:
        raise SystemExit(
            "--learning: expected results of learn, learn-64k, learn-128k or learn-cpu, got none"
        )
    methods = [name for name in dict.fromkeys(m for each in found.values() for m in each)
               if name != UNTRAINED]  # fmt: skip
    figure, panels = pyplot.subplots(
        1, len(found), figsize=(10, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (length, each) in zip(panels.flat, found.items(), strict=True):
        for number, name in enumerate(methods):
            seeds = each.get(name, [])
            steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
            shares = [[looked[step] for looked in seeds] for step in steps]
            colour = _COLOURS[number % len(_COLOURS)]
            style = "-" if number < len(_COLOURS) else "--"
            axes.plot(steps, [mean(one) for one in shares], style, color=colour, label=name)
            lowest, highest = [min(one) for one in shares], [max(one) for one in shares]
            axes.fill_between(steps, lowest, highest, color=colour, alpha=0.12, linewidth=0)
        axes.axhline(enough, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_title(f"{length:,} tokens", fontsize=9)
        axes.set_xlabel("steps", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, 1.05)
    figure.supylabel("share of needles found among eight", fontsize=9)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
