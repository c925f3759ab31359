"""A file that is replaced whole: a crash or a full disk leaves the one that was there."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file and the folders above it; who reads meanwhile sees the old one or the new.

    A link stays, and what it leads to is replaced. A pipe or a device is written to.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a name for what is not on the disk could lead to nothing
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
