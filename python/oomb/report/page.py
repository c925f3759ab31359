"""The page of a report: one file that loads nothing, readable in light and dark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from oomb.report import pictures, tables
from oomb.report.runs import Run, read_run, told_apart

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #66707b; --line: #e3e6ea;
  --page: #fbfbfc; --card: #ffffff;
  --c0: #0072b2; --c1: #e08e00; --c2: #56b4e9; --c3: #d55e00; --c4: #009e73; --c5: #cc79a7;
  --c6: #a3abb4; --c7: #8a6fd1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --muted: #98a2ad; --line: #30363d;
  --page: #0f1317; --card: #171c21;
  --c0: #3a9bdc; --c1: #f0ab2e; --c2: #8fd0f5; --c3: #f0803c; --c4: #2fc295; --c5: #e29cc3;
  --c6: #6b747d; --c7: #ab94ea; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1240px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 23px; margin: 0 } h2 { font-size: 15px; margin: 0 0 10px; font-weight: 600 }
.sub, p.note { color: var(--muted); margin: 4px 0 18px } p.note { margin: 8px 0 0; font-size: 13px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px;
  margin-bottom: 14px }
.tiles div, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
.tiles div { padding: 10px 12px } .tiles b { display: block; font-size: 17px; font-weight: 600 }
.tiles span { color: var(--muted); font-size: 12.5px }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr));
  gap: 14px }
section { padding: 14px 16px; min-width: 0 } section.wide { margin-top: 14px; overflow-x: auto }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums }
svg .end { text-anchor: end } svg .mid { text-anchor: middle } svg .label { fill: var(--ink) }
.grid, .axis, .border { fill: none; stroke: var(--line) } .axis { stroke: var(--muted) }
.border { stroke: var(--muted); stroke-dasharray: 4 4 }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round } .faint { opacity: .3 }
.area { opacity: .28 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--muted); font-size: 13px;
  padding: 6px 0 0 8px }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 14px }
figure { margin: 0 } figure img { width: 100%; image-rendering: pixelated; display: block;
  border: 1px solid var(--line); background: var(--page) }
figcaption { color: var(--muted); font-size: 12.5px; margin-top: 4px }
table { border-collapse: collapse; font-size: 13.5px }
th, td { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line);
  font-weight: 400; vertical-align: top; font-variant-numeric: tabular-nums }
th { color: var(--muted) } .differs td { color: var(--c3) }
pre { overflow-x: auto; font-size: 13px; margin: 8px 0 0 } summary { cursor: pointer }
"""
_COLORS = "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
    for n in range(8)
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
        ValueError: metrics cannot be read, or hold no finished step; the page cannot be written.
    """
    runs = [read_run(run_dir)]
    if compare is not None:
        runs = told_apart(runs[0], read_run(compare, "compare"))
    path = Path(out) if out is not None else Path(run_dir) / "report.html"
    if path.is_dir():
        raise ValueError(f"out: expected a file to write, got the folder {path}")
    text = page(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)  # a page that someone has open is never half-written
    except OSError as error:
        raise ValueError(f"out: expected a file to write, got {path}: {error.strerror}") from error
    return path


def page(runs: Sequence[Run]) -> str:
    """The HTML text; the first run's details, and every run in what can be compared."""
    run = runs[0]
    title = " and ".join(one.name for one in runs)
    charts = [
        _section("Loss", pictures.loss(runs)),
        _section("Throughput", pictures.throughput(runs)),
        _section("Where the time of a step goes", pictures.breakdown(run)),
    ]
    for heading, found in (
        ("Memory tiers in step", pictures.memory_timeline(run)),
        ("Time of the chunks of step", pictures.chunk_times(run)),
        ("What moved between the tiers in step", pictures.traffic(run)),
    ):
        if found is not None:
            charts.append(_section(f"{heading} {found[0]}", found[1]))
    norms = pictures.gradient_norm(runs)
    if norms is not None:
        charts.append(_section("Gradient norm", norms))
    wide = []
    maps = pictures.page_maps(run)
    if maps is not None:
        wide.append(_section(f"Pages read in step {maps[0]}", maps[1] + _MAP_NOTE, wide=True))
    if len(runs) > 1:
        wide.append(_section("Side by side", tables.totals(runs), wide=True))
    if run.plan is not None:
        wide.append(_section("Predicted and measured", tables.plan(run), wide=True))
    wide.append(_section("Settings", tables.settings(runs) + _yaml(run), wide=True))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_COLORS}</style></head><body>"
        f"<h1>{escape(title)}</h1>{_subtitle(run)}{tables.tiles(run)}"
        f'<div class="grid2">{"".join(charts)}</div>{"".join(wide)}</body></html>\n'
    )


_MAP_NOTE = (
    '<p class="note">Rows are blocks of queries from the first to the last, columns are pages of '
    "keys; blue was read. The diagonal is the chunk's own pages, always read.</p>"
)


def _section(title: str, body: str, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{body}</section>"


def _subtitle(run: Run) -> str:
    start, end = run.metrics.start, run.metrics.end
    parts = [str(start["model"])] if start.get("model") else []
    if start.get("context"):
        parts.append(f"{start['context']:,} tokens")
    if start.get("time"):
        parts.append("started " + time.strftime("%Y-%m-%d %H:%M", time.localtime(start["time"])))
    parts.append(f"ended: {end.get('reason')}" if end else "no end recorded: running, or killed")
    return f'<p class="sub">{escape(" · ".join(parts))}</p>'


def _yaml(run: Run) -> str:
    if run.settings is None:
        return ""
    return f"<details><summary>run.yaml</summary><pre>{escape(run.settings)}</pre></details>"
