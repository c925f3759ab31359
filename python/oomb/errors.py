"""Exceptions of the public surface. Bad arguments are plain ``ValueError``s."""

from __future__ import annotations

from typing import Any

import torch


class Error(RuntimeError):
    """Base of everything that oomb raises besides ``ValueError``.

    Attributes:
        snapshot: where every page was when a call failed, as from ``engine.snapshot()``.
    """

    snapshot: dict[str, Any] | None = None


class OutOfMemoryError(Error, torch.OutOfMemoryError):
    """A memory tier cannot hold what a call needs.

    The message always contains ``" out of memory."``, which is what retry loops (accelerate's
    ``find_executable_batch_size``, for one) look for.
    """

    def __init__(self, message: str, *, needed_bytes: int = 0, available_bytes: int = 0) -> None:
        if " out of memory." not in message:
            message = f"oomb is out of memory. {message}"
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class UnsupportedModelError(Error):
    """A model that cannot be run exactly; the message names the layer and the reason."""
