"""What layers hand from chunk to chunk, and how its gradient comes back.

A layer has one carry, both or none. Keys and values stand in pages
(:class:`oomb.core.attention.ChunkAttention`): every later chunk reads them, and their gradient is
summed over all of these. States of recurrences and convolutions
(:class:`oomb.core.border_states.BorderStates`) have a constant size: the next chunk alone reads
them, so their gradient is what that chunk leaves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from oomb.core.chunk_run import ChunkRun


class Carry(Protocol):
    """What one kind of layer hands on."""

    def on(self, run: ChunkRun) -> AbstractContextManager[None]:
        """Around a chunk's run, and in the sweep around its backward."""

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the sweep propagates back beside the chunk's loss, and the gradients of these."""


class FillComplete(Exception):  # no error: the fill has all it needs
    """What later chunks need of this one is handed on."""
