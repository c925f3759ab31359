"""Tables of ``oomb bench step``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from oomb.cli.bench_step import Row
from oomb.cli.kept import levels_text
from oomb.cli.machine import format_bytes

_WIDTH = 150  # of the comparison, which is one table


def print_step(row: Row) -> None:
    """That a step is done, while others follow."""
    Console().print(
        f"{row['tokens']:,} tokens: {row['seconds']:.2f} s, "
        f"{row['tokens_per_second']:,.0f} tokens/s, loss {row['loss']:.4f}",
        highlight=False,
    )


def print_steps(rows: list[Row]) -> None:
    """The engine's steps in two tables: time, and memory with what was copied.

    ``copies`` and ``growth``: seconds waited for copies, and for new memory of the host tier;
    ``pages read``: distinct past pages per chunk and layer, mean and largest.
    """
    time = _table("tokens", "seconds", "fill", "sweep", "copies", "growth", "tok/s", "TFLOP/s")
    known = any("mfu" in row for row in rows)
    if known:
        time.add_column("MFU", justify="right")
    memory = _table("tokens", "pages, device", "host", "copied to device", "to host")
    chosen = any("distinct_pages_mean" in row for row in rows)
    if chosen:
        memory.add_column("pages read", justify="right")
    for row in rows:
        seconds = ("seconds", "fill_seconds", "sweep_seconds")
        waits = ("exposed_copy_seconds", "exposed_growth_seconds")
        cells = [f"{row['tokens']:,}", *(f"{row[name]:.2f}" for name in (*seconds, *waits))]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['flops_per_second'] / 1e12:.3g}"]
        time.add_row(*cells, *([f"{row['mfu']:.1%}" if "mfu" in row else "-"] if known else []))
        sizes = ("device_peak_bytes", "host_peak_bytes", "h2d_bytes", "d2h_bytes")
        cells = [f"{row['tokens']:,}", *(format_bytes(row[name]) for name in sizes)]
        memory.add_row(*cells, *([_pages(row)] if chosen else []))
    console = Console()
    console.print(time)
    console.print(memory)
    for row in rows:
        for line in _more(row):
            console.print(f"{row['tokens']:,} tokens: {line}", markup=False, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _more(row: Row) -> list[str]:
    """What is not said of every step."""
    lines = []
    if row.get("kept_output_share"):
        lines.append(
            f"{row['kept_output_share']:.0%} of attention's outputs were kept for the sweep, "
            f"{row['kept_output_bytes'] / 2**30:.2f} GiB; "
            f"{row['kept_output_seconds']:.2f} s of attention were not computed again"
        )
    if row.get("kept_mlp_output_bytes"):
        kept = row["kept_mlp_output_bytes"] / 2**30
        lines.append(f"{kept:.2f} GiB of MLPs' outputs were kept for the sweep")
    if len(row.get("recomputed", {})) > 1:
        lines.append(f"in their room less was computed again: {levels_text(row['recomputed'])}")
    if row.get("fetched_weight_bytes"):
        lines.append(
            f"{row['fetched_weight_bytes'] / 2**30:.2f} GiB of weights came from the host; compute "
            f"waited {row['exposed_weight_seconds']:.2f} s for them"
        )
    if "exchange_seconds_by_rank" in row:
        each = ", ".join(f"{seconds:.2f}" for seconds in row["exchange_seconds_by_rank"])
        lines.append(f"{row['ranks']} ranks; seconds in exchanges with the others: {each}")
    if _on_gpu(row):
        lines.append(f"torch reserved {row['reserved_ratio']:.3f} x what it allocated, at the peak")
    return lines


def print_rivals(rivals: list[Row], fastest: dict[int, Row]) -> None:
    """Ordinary training beside the engine's fastest step of each length."""
    columns = ["tokens", "training", "seconds", "tok/s", "GPU beyond weights", "host", "loss"]
    table = Table(*columns, "seconds ÷ ours", "memory ÷ ours")
    for length, ours in sorted(fastest.items()):
        table.add_row(*_measured(ours | {"name": "OOMB", "seconds_to_ours": 1.0}))
        for row in rivals:
            if row["tokens"] == length:
                table.add_row(*_measured(row) if row["fits"] else _missing(row))
        table.add_section()
    console = Console(width=_WIDTH)
    console.print(table)
    for row in rivals:
        if not row["fits"]:
            line = f"{row['name']} at {row['tokens']:,} tokens does not fit; {row['why']}"
            console.print(line, markup=False, highlight=False)  # torch's texts have brackets


def _measured(row: Row) -> list[str]:
    on_gpu = row["torch_peak_bytes"] + row.get("device_peak_bytes", 0) if _on_gpu(row) else None
    return [
        f"{row['tokens']:,}",
        row["name"],
        f"{row['seconds']:.2f}",
        f"{row['tokens_per_second']:.0f}",
        format_bytes(on_gpu),
        format_bytes(row.get("host_bytes", row.get("host_peak_bytes"))),
        f"{row['loss']:.4f}",
        f"{row['seconds_to_ours']:.2f}",
        f"{row.get('memory_to_ours', 1.0):.2f}" if _on_gpu(row) else "unknown",
    ]


def _missing(row: Row) -> list[str]:
    return [f"{row['tokens']:,}", row["name"], "does not fit"]


def _on_gpu(row: Row) -> bool:
    """Torch counts its peak there alone."""
    return "torch_peak_bytes" in row


def _pages(row: Row) -> str:
    if "distinct_pages_mean" not in row:
        return "-"
    return f"{row['distinct_pages_mean']:.0f}, {row['distinct_pages_max']}"
