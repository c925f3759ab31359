"""How a command ends that cannot do what it was asked: one line, and an exit code."""

from __future__ import annotations

import os
import tempfile
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
    try:
        if path.is_dir():
            refuse(command, f"{option}: expected a file to write, got the folder {path}")
        if path.exists() and not path.is_file():
            return  # a pipe may not be opened twice: its reader would see the end
        target = Path(os.path.realpath(path))  # behind a link
        target.parent.mkdir(parents=True, exist_ok=True)
        # Ranks try at the same time, so a file that is not there is not made and removed again.
        with (
            target.open("a")
            if os.path.lexists(target)
            else tempfile.TemporaryFile(dir=target.parent)
        ):
            pass
    except OSError as error:
        refuse(command, f"{option}: expected a file to write, got {path}: {error.strerror}")


def check_folder(command: str, option: str, path: Path) -> None:
    """Refuse a folder that no file can be written to, before the work for it; makes it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        refuse(command, f"{option}: expected a folder to write to, got {path}: {error.strerror}")
