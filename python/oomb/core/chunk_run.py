"""The chunk that is being run, as a value: which one, and as what.

It is set for the length of a chunk, read where layers, attention and mixers need it, and changed by
nobody. Two chunks that take turns have contexts of their own. Autograd's threads have none: what
their backward needs of it is taken along from the forward, and a layer that is computed again runs
:meth:`~ChunkRun.under_way` once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Literal

from oomb.model.swap import Swaps, swapping

Phase = Literal["fill", "sweep"]
EndsWith = Literal["pages", "states"]


@dataclass(frozen=True)
class ChunkRun:
    """One pass over one chunk.

    Attributes:
        chunk: its number in the call.
        ends_with: of a fill: ends where the last layer has handed on its keys and values
            (``"pages"``) or its states; None: with the chunk's hidden states.
    """

    chunk: int
    phase: Phase
    ends_with: EndsWith | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, this is the current one."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[ChunkRun | None] = ContextVar("the chunk that is being run", default=None)


def current_run() -> ChunkRun:
    """The chunk that is being run in this context."""
    run = _current.get()
    assert run is not None
    return run


@swapping
def outer_run_afterwards(swaps: Swaps) -> None:
    """Whatever interrupts a chunk, the current one is again what it is now."""
    swaps.afterwards(partial(_current.set, _current.get()))
