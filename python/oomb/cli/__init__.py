"""The command line: ``oomb <command>``. Each command is a module of its own here."""

from __future__ import annotations

import typer

from oomb.cli import bench
from oomb.cli.audit import audit
from oomb.cli.demo import demo
from oomb.cli.doctor import doctor
from oomb.cli.plan import plan
from oomb.cli.report import report
from oomb.cli.train import train

app = typer.Typer(
    name="oomb",
    help="Exact training on very long sequences with memory that does not grow with them.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Exact training on very long sequences with memory that does not grow with them."""


app.command()(audit)
app.command()(demo)
app.command()(doctor)
app.command()(plan)
app.command()(report)
app.command()(train)
app.add_typer(bench.app, name="bench")
