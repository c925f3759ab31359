"""The command line: ``oomb <command>``. Each command is a module of its own here.

They import torch and transformers, which take seconds, only once their options are checked.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Annotated

import typer

from oomb.cli import bench
from oomb.cli.audit import audit
from oomb.cli.demo import demo
from oomb.cli.doctor import doctor
from oomb.cli.plan import plan
from oomb.cli.refusal import refuse
from oomb.cli.report import report
from oomb.cli.train import train

app = typer.Typer(
    name="oomb",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            from oomb import __version__
        except ImportError as error:
            refuse("--version", error, code=1)
        typer.echo(f"oomb {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Exact training on very long sequences with memory that does not grow with them."""
    # What these libraries tell their programmers is no news to who runs a command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
    for library in ("transformers", "peft", "accelerate", "trl"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}\b")
    # peft imports bitsandbytes where it is installed. On a CPU with bf16 products that warns of a
    # kernel for inference which it would have to fetch.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # transformers imports torchao likewise, which warns of kernels for GPUs that are not there.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


app.command()(audit)
app.command()(demo)
app.command()(doctor)
app.command()(plan)
app.command()(report)
app.command()(train)
app.add_typer(bench.app, name="bench")
