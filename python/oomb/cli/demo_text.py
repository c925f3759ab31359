"""The demo's text: the source of Python's own library, found wherever Python is."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_HELD_OUT_EVERY = 10  # of the files


@dataclass(frozen=True)
class Text:
    """Bytes of two disjoint sets of files, one token per byte."""

    train: torch.Tensor  # [bytes] uint8
    held_out: torch.Tensor

    def batch(self, begin: int, num_tokens: int) -> torch.Tensor:
        """[1, num_tokens] int64 of the training text, which starts over at its end."""
        return _cut(self.train, begin, num_tokens)

    def held_out_batch(self, num_tokens: int) -> torch.Tensor:
        """[1, num_tokens] int64 of files that are not trained on."""
        return _cut(self.held_out, 0, num_tokens)

    def save(self, folder: Path) -> None:
        """Both sets as text files, ``train.txt`` and ``held_out.txt``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.txt").write_bytes(self.train.numpy().tobytes())
        (folder / "held_out.txt").write_bytes(self.held_out.numpy().tobytes())


def _cut(text: torch.Tensor, begin: int, num_tokens: int) -> torch.Tensor:
    index = torch.arange(begin, begin + num_tokens) % text.numel()
    return text[index].long()[None]


def python_source(folder: Path | None = None) -> Text:
    """Every file of Python's library but its tests, in the order of their names.

    Raises:
        FileNotFoundError: this Python comes without its source.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not _NOT_LIBRARY & set(file.relative_to(folder).parts)
    ]
    if len(files) < _HELD_OUT_EVERY:
        raise FileNotFoundError(f"no source of the Python library in {folder}")
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    return Text(_join(set(files) - set(held_out)), _join(held_out))


def _join(files: Iterable[Path]) -> torch.Tensor:
    text = b"\n".join(file.read_bytes() for file in sorted(files))
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
