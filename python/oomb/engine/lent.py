"""Weights of all ranks for the first of a sequence, which runs the model past the engine.

    first     gather │ layers, sample, call a tool, layers            │ done
    others    gather │ wait                                           │ go on

So under ``"zero1"`` and ``"zero2"``, and under ``"zero3"`` where every rank has the room. Else

    first     layer 0 … layer n │ sample, call a tool │ layer 0 … layer n │ done
    others    gather  … gather  │ wait                │ gather  … gather  │ go on
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from oomb.core.tiers import free_memory
from oomb.engine.engine import Engine
from oomb.model.swap import Swaps, as_before_afterwards
from oomb.parallel.group import Ranks

T = TypeVar("T")

_DONE = -1


def on_first(
    engine: Engine, notes: Ranks, work: Callable[[], T], *, at_once: bool = True
) -> T | None:
    """What ``work`` returned on the first rank of the engine's sequence, which alone does it.

    It may run the model's own forward, without gradients. All ranks call this; an error of one is
    raised by all. Elsewhere None is returned.

    Args:
        notes: the same ranks, on the host, who wait as long as the work may take.
        at_once: layers of ``"zero3"`` too are gathered before the work begins, where whole weights
            take no more than half of each rank's free memory. The rest is for caches.
    """
    placement, weights = engine._placement, engine._weights

    from oomb.parallel.fsdp_hooks import hide_marks  # FSDP2 is for those who use it

    def has_room() -> bool:
        return at_once and 2 * weights.num_bytes <= free_memory(engine._model.device)

    def run() -> T | None:
        found: T | None = None
        # Nobody waits among the engine's own ranks while the first one works: these have no time.
        with notes.call(), placement.call(), Swaps() as swaps, torch.no_grad():
            whole = all(notes.collect(has_room))
            if placement.rank == 0:
                asked = partial(_tell, notes)
                weights.gather(swaps.afterwards, on_use=asked, at_once=whole)
                hide_marks(engine._model.causal, swaps.afterwards)
                found = work()
                _tell(notes, _DONE)
            else:
                weights.gather(swaps.afterwards, at_once=whole)
                while (layer := _tell(notes, _DONE)) != _DONE:
                    weights.pass_by(layer)
            placement.settle(lambda: None)
            notes.settle(lambda: None)
        return found

    return as_before_afterwards(run, alone=False)  # work may call an engine of another model


def _tell(notes: Ranks, layer: int) -> Any:
    """What the first rank says."""
    return notes.collect(lambda: layer)[0]
