"""Writes that are on the disk when they return."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file; its folder still has to be synchronised."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def files_below(folder: Path) -> list[Path]:
    """Every file below a folder, sorted by its path."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def folders_below(folder: Path) -> list[Path]:
    """A folder's subfolders, innermost first, then the folder itself."""
    inner = (path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())
    return [*sorted(inner, reverse=True), folder]
