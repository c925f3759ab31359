"""The tables of a report, each from the records of one run or of several to compare."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from oomb.monitor.observer import Record
from oomb.report.runs import Run, is_number
from oomb.units import bytes_text, count_text, seconds_text


def tiles(run: Run) -> str:
    """The figures to know first."""
    losses = [v for v in run.column("loss") if v is not None]
    name = run.main_set()
    best = _best(run.evaluations().get(name or "", []))
    facts = [
        ("steps", f"{run.steps[-1]:,.0f}"),
        ("last loss", f"{losses[-1]:.4f}" if losses else "not finite"),
        (
            f"best evaluation, {name}" if name else "best evaluation",
            f"{best['loss']:.4f}" if best else "",
        ),
        ("tokens trained on", count_text(run.total("tokens"))),
        ("tokens/s, median", _thousands(run.median("tokens_per_second"))),
        ("step, median", _optional(run.median("seconds"), seconds_text)),
        ("device tier, peak", _optional(run.most("device_peak_bytes"), bytes_text)),
        ("host tier, peak", _optional(run.most("host_peak_bytes"), bytes_text)),
        ("torch, peak", _optional(run.most("torch_peak_bytes"), bytes_text)),
    ]
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in facts
        if value
    )
    return f'<div class="tiles">{cells}</div>'


def settings(runs: Sequence[Run]) -> str:
    """What each run was started with, row by row."""
    columns = [_flat(run.metrics.start) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    for left_out in ("event", "time", "config.type"):
        if left_out in names:
            names.remove(left_out)
    rows = []
    for name in names:
        values = [column.get(name, "") for column in columns]
        if not any(values):
            continue
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        rows.append(f"<tr{differs}><th>{escape(name)}</th>{cells}</tr>")
    return table(runs, rows)


def totals(runs: Sequence[Run]) -> str:
    """Results side by side."""
    rows = []
    for name, key, how, form in (
        ("last loss", "loss", "last", lambda v: f"{v:.4f}"),
        ("tokens/s, median", "tokens_per_second", "median", lambda v: f"{v:,.0f}"),
        ("seconds per step, median", "seconds", "median", lambda v: f"{v:.3g}"),
        ("device tier, peak", "device_peak_bytes", "most", bytes_text),
        ("host tier, peak", "host_peak_bytes", "most", bytes_text),
        ("torch, peak", "torch_peak_bytes", "most", bytes_text),
        ("kept outputs, most", "kept_output_bytes", "most", bytes_text),
        ("of MLPs, most", "kept_mlp_output_bytes", "most", bytes_text),
        ("attention spared by them, median", "kept_output_seconds", "median", seconds_text),
        ("waited for copies, median", "exposed_copy_seconds", "median", seconds_text),
        ("weights from the host, median", "fetched_weight_bytes", "median", bytes_text),
        ("waited for them, median", "exposed_weight_seconds", "median", seconds_text),
        ("waited for host memory, most", "exposed_growth_seconds", "most", seconds_text),
    ):
        values = [run.column(key)[-1] if how == "last" else getattr(run, how)(key) for run in runs]
        if any(v is not None for v in values):
            cells = "".join(f"<td>{'' if v is None else escape(form(v))}</td>" for v in values)
            rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    return table(runs, rows)


def evaluations(run: Run) -> str | None:
    """Losses of each evaluation set; None where no set has a name."""
    sets = run.evaluations()
    if not any(sets):
        return None
    rows = ["<tr><td></td><th>best loss</th><th>in step</th><th>last loss</th></tr>"]
    for name, records in sets.items():
        best, last = _best(records), records[-1].get("loss")
        cells = (
            f"{best['loss']:.4f}" if best else "not finite",
            f"{best['step']:,}" if best else "",
            "not finite" if last is None else f"{last:.4f}",
        )
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr><th>{escape(name or 'evaluation')}</th>{row}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _best(evals: Sequence[Record]) -> Record | None:
    """The evaluation of the lowest loss, the first of equals."""
    finite = [record for record in evals if record.get("loss") is not None]
    return min(finite, key=lambda record: float(record["loss"]), default=None)


def ranks(run: Run) -> str | None:
    """Seconds of a step on each rank, and those in exchanges; None where one process ran."""
    steps = run.steps_of_ranks()
    if not steps:
        return None
    rows = ["<tr><td></td><th>step, median</th><th>in exchanges</th><th>of the step</th></tr>"]
    for rank in range(steps[-1]["ranks"]):
        whole = statistics.median(step["seconds_by_rank"][rank] for step in steps)
        sent = statistics.median(step["exchange_seconds_by_rank"][rank] for step in steps)
        cells = (seconds_text(whole), seconds_text(sent), f"{sent / whole:.1%}" if whole else "")
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>rank {rank}</th>{row}</tr>")
    return f"<table>{''.join(rows)}</table>"


def plan(run: Run) -> str:
    """What was predicted of a call before the run, and what was measured."""
    assert run.plan is not None
    predicted, measured = run.plan.get("predicted") or {}, run.plan.get("measured") or {}
    rows = ["<tr><td></td><th>predicted</th><th>measured</th><th>measured / predicted</th></tr>"]
    for name, text in _PLANNED.items():
        expected, found = predicted.get(name), measured.get(name)
        found = found if is_number(found) else None
        if not is_number(expected) or not (expected or found):
            continue
        ratio = f"{found / expected:.2f}" if found is not None and expected else ""
        measured_text = "" if found is None else _quantity(name, found)
        cells = (_quantity(name, expected), measured_text, ratio)
        rows.append(f"<tr><th>{escape(text)}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    return table([run], rows)


# What is predicted, as people call it; first what is measured too.
_PLANNED = {
    "seconds": "time of a call",
    "device_pool_bytes": "pages on the device",
    "host_pool_bytes": "pages on the host",
    "torch_peak_bytes": "torch's memory",
    "device_bytes": "device, peak of all",
    "host_bytes": "host, peak of all",
    "parameter_bytes": "parameters",
    "optimizer_bytes": "optimizer, on the device",
    "optimizer_host_bytes": "optimizer, on the host",
    "step_bytes": "gradients and what the optimizer takes while it steps",
    "kept_gradient_bytes": "gradients kept between calls",
    "sum_bytes": "sums of gradients",
    "call_bytes": "a chunk's activations and logits, with those sums",
    "kept_output_bytes": "outputs of attention, kept for the sweep",
    "kept_mlp_output_bytes": "outputs of MLPs, kept for the sweep",
    "list_bytes": "page lists, on the host",
    "border_bytes": "states between chunks, on the host",
    "h2d_bytes": "moved to the device",
    "d2h_bytes": "moved to the host",
}


def table(runs: Sequence[Run], rows: Sequence[str]) -> str:
    head = ""
    if len(runs) > 1:
        head = "<tr><td></td>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _flat(record: Any, name: str = "") -> dict[str, str]:
    """Leaves of nested mappings: ``config.attention.budget``."""
    if not isinstance(record, dict):
        return {name: _setting(name, record)}
    leaves: dict[str, str] = {}
    for key, value in record.items():
        leaves |= _flat(value, f"{name}.{key}" if name else str(key))
    return leaves


def _setting(name: str, value: Any) -> str:
    """A setting as people read it: sizes with their unit, large numbers with commas."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_setting("", item) for item in value)
    if isinstance(value, int):
        if name.endswith(("memory", "bytes")):
            return bytes_text(value)
        return count_text(value) if name.endswith("parameters") else f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quantity(name: str, value: float) -> str:
    """A number with the unit that its name ends in."""
    return bytes_text(value) if name.endswith("bytes") else seconds_text(value)


def _thousands(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _optional(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)
