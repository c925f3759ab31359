"""``oomb demo``: chunked against ordinary training of a small model on a long real text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oomb.cli.demo_process import OutOfBudget, TaskFailed
from oomb.cli.refusal import check_folder, refuse


def demo(
    out: Annotated[Path, typer.Option(help="Folder for picture, figures, model and text.")] = Path(
        "oomb-demo"
    ),
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1, help="Leave out the lengths that would take longer. Default: none is left out."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: a look at the parts.")
    ] = False,
) -> None:
    """Train a small model on a long text, chunked and as usual, and compare the two."""
    check_folder("demo", "--out", out)
    from oomb.cli.demo_run import FULL, QUICK, run

    try:
        run(out, seconds, QUICK if quick else FULL)
    except (OSError, OutOfBudget, TaskFailed) as error:
        refuse("demo", error, code=1)
