"""Warnings that point at the line which called OOMB, however deep inside they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_HERE = str(Path(__file__).parent)


def warn_caller(text: str) -> None:
    """Warn with the file and line of the innermost caller that is none of the package's."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
