"""``oomb train``: a run from a YAML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from oomb.cli.quiet import quiet


def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run; see docs/train.md.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE]...",
            help="Settings that win over the file's, such as optimizer.learning_rate=1e-5.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest intact checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")
    ] = False,
) -> None:
    """Train a model: checkpoints, metrics, the final weights and a report in one folder."""
    from oomb.train.errors import BadInput

    try:
        from oomb.train.reading import read_settings

        settings = read_settings(config, overrides or ())  # before torch, which takes seconds

        from oomb.errors import Error, UnsupportedModelError
        from oomb.train.run import train as carry_out
    except ModuleNotFoundError as error:
        if error.name == "oomb._C":
            _fail(f"oomb train: {error}")
        _fail(f"oomb train needs {error.name}: pip install 'oomb[train]'")
    except BadInput as error:
        _fail(str(error), code=2)
    try:
        with quiet():
            code = carry_out(settings, resume=resume, dry_run=dry_run)
    except (BadInput, UnsupportedModelError) as error:
        _fail(str(error), code=2, error=error)
    except Error as error:
        _fail(str(error), error=error)
    raise typer.Exit(code)


def _fail(text: str, code: int = 1, error: Exception | None = None) -> NoReturn:
    """One line, from the rank that failed; where each fails by itself, from one of each host."""
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if error is not None:
        from oomb.parallel.failure import RankLostError, failed_rank  # torch, which takes seconds
        from oomb.parallel.job import rank_of_job

        failed = failed_rank(error)
        lost = isinstance(error, RankLostError)  # and cannot say so itself
        speaks = lost or (speaks if failed is None else failed in (-1, rank_of_job()))
    if not speaks:
        raise typer.Exit(code)
    console = Console(stderr=True)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
