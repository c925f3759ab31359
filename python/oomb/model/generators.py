"""torch's random generators, which go on from where they were."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from oomb.model.swap import Swaps, swapping


@swapping
def kept_generators(swaps: Swaps, gpus: Sequence[torch.device]) -> None:
    """torch's generators, of the CPU and some GPUs, go on afterwards from where they are now."""
    swaps.afterwards(partial(torch.set_rng_state, torch.get_rng_state()))
    for gpu in gpus:
        swaps.afterwards(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(gpu), gpu))


def generator_states(gpus: Sequence[torch.device]) -> list[torch.Tensor]:
    """Of the CPU's and of some GPUs'."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


def draw_from(states: list[torch.Tensor], gpus: Sequence[torch.device]) -> None:
    """Go on from what :func:`generator_states` has given."""
    torch.set_rng_state(states[0])
    for gpu, state in zip(gpus, states[1:], strict=True):
        torch.cuda.set_rng_state(state, gpu)
