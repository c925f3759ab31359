"""``oomb report``: a run's page with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oomb.cli.refusal import refuse


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run: what `oomb train` wrote.")],
    compare: Annotated[Path | None, typer.Option(help="Another run, beside it.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page; default RUN/report.html.")] = None,
) -> None:
    """Make one self-contained HTML page with pictures of a run, finished or not."""
    from oomb.report import write_report

    try:
        path = write_report(run, out, compare)
    except (OSError, ValueError) as error:
        refuse("report", error)
    # Where the page went to standard output this line is no part of it.
    console = Console(stderr=not path.is_file())
    console.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)
