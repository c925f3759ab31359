"""What a process sets aside, and makes current, while a call runs in it."""

from __future__ import annotations

from functools import partial

import torch

from oomb.core.collector import older_objects_aside
from oomb.model.causal import CausalModel
from oomb.model.swap import Swaps, swapping


@swapping
def current_gpu(swaps: Swaps, device: torch.device) -> None:
    """Makes a model's GPU the current one, which Triton's kernels need; nothing for a CPU."""
    if device.type == "cuda":
        swaps.afterwards(partial(torch.cuda.set_device, torch.cuda.current_device()))
        torch.cuda.set_device(device)


@swapping
def on_device(swaps: Swaps, model: CausalModel) -> None:
    """Makes a model's GPU the current one; its layers find weights there that the host keeps."""
    swaps.also(current_gpu(model.device))
    if model.host_weights is not None:
        swaps.also(model.host_weights.streaming())


@swapping
def surroundings(swaps: Swaps, model: CausalModel) -> None:
    """What a process sets aside while a call runs in it."""
    swaps.also(older_objects_aside())
    swaps.also(on_device(model))
