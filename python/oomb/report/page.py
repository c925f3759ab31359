"""The page of a report: one file that loads nothing, readable in light and dark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from oomb.replacing import replace_file
from oomb.report import pictures, tables
from oomb.report.runs import Run, read_run, told_apart
from oomb.report.script import SCRIPT
from oomb.report.style import STYLE

# Whatever a run's names and settings hold, the page loads nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MAP_NOTE = (
    '<p class="note">Rows are blocks of queries from the first to the last, columns are pages of '
    "keys; blue was read. The diagonal is the chunk's own pages, always read.</p>"
)
_RANKS_NOTE = (
    '<p class="note">Seconds in exchanges are those that a rank waited, for a slower rank '
    "included; what ran beside exchanges hid the rest.</p>"
)


def write_report(
    run_dir: str | Path, out: str | Path | None = None, compare: str | Path | None = None
) -> Path:
    """Write a run's report; returns its path.

    Args:
        run_dir: folder of a run, finished or not.
        out: of the page; None: ``report.html`` in the run's folder.
        compare: folder of another run to show beside it.

    Raises:
        FileNotFoundError: a folder has no metrics.
        ValueError: records cannot be read, or hold no finished step; the page cannot be written.
    """
    runs = [read_run(run_dir)]
    if compare is not None:
        runs = told_apart(runs[0], read_run(compare, "compare"))
    path = Path(out) if out is not None else Path(run_dir) / "report.html"
    if path.is_dir():
        raise ValueError(f"out: expected a file to write, got the folder {path}")
    text = page(runs)
    try:
        replace_file(path, text.encode(errors="replace"))  # JSON may hold half a character
    except OSError as error:
        raise ValueError(f"out: expected a file to write, got {path}: {error.strerror}") from error
    return path


def page(runs: Sequence[Run]) -> str:
    """The HTML text: one picture for all runs where they share an axis, else one for each."""
    title = " and ".join(one.name for one in runs)
    charts = [
        _section("Loss", pictures.loss(runs)),
        _section("Throughput", pictures.throughput(runs)),
    ]
    charts += _details(runs)
    wide = []
    for run in runs:
        maps = pictures.page_maps(run)
        if maps is not None:
            heading = f"Pages read in step {maps[0]:,}"
            wide.append(_section(heading, maps[1] + _MAP_NOTE, _of(run, runs), wide=True))
    for heading, found in (
        ("Gradient norm", pictures.gradient_norm(runs)),
        ("Learning rate", pictures.learning_rate(runs)),
    ):
        if found is not None:
            charts.append(_section(heading, found))
    if len(runs) > 1:
        wide.append(_section("Side by side", tables.totals(runs), wide=True))
    for run in runs:
        of_sets = tables.evaluations(run)
        if of_sets is not None:
            wide.append(_section("Evaluations", of_sets, _of(run, runs), wide=True))
        of_ranks = tables.ranks(run)
        if of_ranks is not None:
            wide.append(_section("Ranks", of_ranks + _RANKS_NOTE, _of(run, runs), wide=True))
        if run.plan is not None:
            planned = tables.plan(run)
            wide.append(_section("Predicted and measured", planned, _of(run, runs), wide=True))
    yamls = "".join(_yaml(run, _of(run, runs)) for run in runs)
    wide.append(_section("Settings", tables.settings(runs) + yamls, wide=True))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{_heads(runs)}"
        f'<div class="grid2">{"".join(charts)}</div>{"".join(wide)}'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _details(runs: Sequence[Run]) -> list[str]:
    """What steps and chunks took; the same picture of two runs side by side."""
    charts = [
        _section("Where the time of a step goes", pictures.breakdown(run), _of(run, runs))
        for run in runs
    ]
    for heading, picture in (
        ("Memory tiers in step", pictures.memory_timeline),
        ("Time of the chunks of step", pictures.chunk_times),
        ("What moved between the tiers in step", pictures.traffic),
    ):
        for run in runs:
            found = picture(run)
            if found is not None:
                charts.append(_section(f"{heading} {found[0]:,}", found[1], _of(run, runs)))
    return charts


def _of(run: Run, runs: Sequence[Run]) -> str:
    """The run's name where there is another."""
    return run.name if len(runs) > 1 else ""


def _heads(runs: Sequence[Run]) -> str:
    """What each run is, and the figures to know first."""
    if len(runs) == 1:
        return _subtitle(runs[0]) + tables.tiles(runs[0])
    return "".join(
        f'<h3><i class="b{pictures.color_of(number)}"></i>{escape(run.name)}</h3>'
        f"{_subtitle(run)}{tables.tiles(run)}"
        for number, run in enumerate(runs)
    )


def _section(title: str, body: str, of: str = "", wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    whose = f' <span class="of">{escape(of)}</span>' if of else ""
    return f"<section{kind}><h2>{escape(title)}{whose}</h2>{body}</section>"


def _subtitle(run: Run) -> str:
    start, end = run.metrics.start, run.metrics.end
    parts = [str(start["model"])] if start.get("model") else []
    if context := start.get("context"):
        parts.append(f"{context:,} tokens" if isinstance(context, int) else f"{context} tokens")
    if isinstance(start.get("time"), (int, float)):
        with suppress(ValueError, OverflowError, OSError):  # other programs count nanoseconds
            begun = time.localtime(start["time"])
            parts.append("started " + time.strftime("%Y-%m-%d %H:%M", begun))
    parts.append(f"ended: {end.get('reason')}" if end else "no end recorded: running, or killed")
    return f'<p class="sub">{escape(" · ".join(parts))}</p>'


def _yaml(run: Run, of: str) -> str:
    if run.settings is None:
        return ""
    name = f"run.yaml of {of}" if of else "run.yaml"
    return f"<details><summary>{escape(name)}</summary><pre>{escape(run.settings)}</pre></details>"
