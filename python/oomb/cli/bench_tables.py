"""Tables of ``oomb bench step``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from oomb.cli.bench_step import Row
from oomb.cli.machine import format_bytes

_WIDTH = 150


def print_steps(rows: list[Row]) -> None:
    """The engine's steps.

    ``exposed`` and ``growth``: waited for copies, and for new memory of the host tier; ``pages``:
    distinct past pages per chunk and layer, mean and largest.
    """
    columns = ["tokens", "seconds", "fill", "sweep", "tok/s", "MFU", "device", "host", "H2D"]
    table = Table(*columns, "exposed", "growth", "pages")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['fill_seconds']:.2f}",
            f"{row['sweep_seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['mfu']:.3f}",
            f"{row['device_peak_bytes'] / 2**30:.2f} GiB",
            f"{row['host_peak_bytes'] / 2**30:.2f} GiB",
            f"{row['h2d_bytes'] / 2**30:.2f} GiB",
            f"{row['exposed_copy_seconds']:.2f} s",
            f"{row['exposed_growth_seconds']:.2f} s",
            _pages(row),
        )
    Console(width=_WIDTH).print(table)


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
            console.print(line, highlight=False)


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
