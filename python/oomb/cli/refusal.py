"""How a command ends that cannot do what it was asked: one line, and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

CORRECTABLE = 2  # in the options, files or model; everything else ends with 1


def refuse(command: str, error: object, code: int = CORRECTABLE) -> NoReturn:
    """Say why on standard error, and exit."""
    console = Console(stderr=True)
    text = f"oomb {command}: {error}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None


def check_out(command: str, option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work for it; makes its folder."""
    if path is None:
        return
    if path.is_dir():
        refuse(command, f"{option}: expected a file to write, got the folder {path}")
    target = path.resolve()  # behind a link
    there = target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a"):
            pass
        if not there:
            target.unlink()
    except OSError as error:
        refuse(command, f"{option}: expected a file to write, got {path}: {error.strerror}")
