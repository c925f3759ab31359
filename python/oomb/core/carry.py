"""What layers hand from chunk to chunk, and how its gradient comes back.

A layer has one carry, both or none. Keys and values stand in pages
(:class:`oomb.core.attention.ChunkAttention`): every later chunk reads them, and their gradient is
summed over all of these. States of recurrences and convolutions
(:class:`oomb.core.border_states.BorderStates`) have a constant size: the next chunk alone reads
them, so their gradient is what that chunk leaves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

Phase = Literal["fill", "sweep"]


class Carry(Protocol):
    """What one kind of layer hands on.

    Attributes:
        phase: of the call.
        stop_at_last: the fill ends where the last of it is handed on.
    """

    phase: Phase
    stop_at_last: bool

    def on(self, chunk: int) -> AbstractContextManager[None]:
        """Inside, it is ``chunk`` that is run, and in the sweep propagated back."""

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the sweep propagates back beside the chunk's loss, and the gradients of these."""


class FillComplete(Exception):  # no error: the fill has all it needs
    """What later chunks need of this one is handed on."""
