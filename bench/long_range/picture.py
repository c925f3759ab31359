"""A picture of a run's answers: by length and by the attention that they were asked under."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

# Colours that stay apart for the colour-blind (Okabe and Ito).
_COLOURS = ("#56B4E9", "#0072B2", "#CC79A7", "#D55E00")
_WIDTH = 0.8  # of a length's bars together


def draw(path: Path, runs: list[dict[str, Any]], task: str) -> None:
    """A panel for each model that was asked at two lengths, a bar for each attention.

    Bars are means over seeds, whiskers their ranges.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found: dict[str, dict[str, dict[int, list[float]]]] = {}  # model, attention, length
    for run in runs:
        for name, piece in run["pieces"].items():
            for key, share in piece.get("asked", {}).items():
                asked, length, attention = key.split(" | ")
                if asked == task:
                    by_length = found.setdefault(name, {}).setdefault(attention, {})
                    by_length.setdefault(int(length), []).append(share)
    figure, panels = pyplot.subplots(
        2, -(-len(found) // 2), figsize=(10, 5), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (name, attentions) in zip(panels.flat, found.items(), strict=False):
        lengths = sorted({length for one in attentions.values() for length in one})
        for number, (attention, shares) in enumerate(attentions.items()):
            width = _WIDTH / len(attentions)
            at = [lengths.index(n) - _WIDTH / 2 + (number + 0.5) * width for n in shares]
            means = [mean(each) for each in shares.values()]
            below = [m - min(each) for m, each in zip(means, shares.values(), strict=True)]
            above = [max(each) - m for m, each in zip(means, shares.values(), strict=True)]
            axes.bar(at, means, width, yerr=(below, above), label=attention,
                     color=_COLOURS[number % len(_COLOURS)],
                     error_kw={"elinewidth": 0.8, "ecolor": "#333333"})  # fmt: skip
        trained, _, method = name.partition(" ")
        axes.set_title(f"{method}, {int(trained):,} tokens", fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths])
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, 1.05)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    figure.supylabel(f"share of right answers: {task}", fontsize=9)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
