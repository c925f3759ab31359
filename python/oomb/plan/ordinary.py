"""The other way to train on one GPU: layer by layer, checkpointed, layer inputs in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb.plan.planner import Planner
from oomb.plan.prediction import Prediction
from oomb.trace.layerwise import layerwise_bytes


@dataclass(frozen=True, kw_only=True)
class OrdinaryTraining:
    """Ordinary training with checkpointing and layer inputs offloaded; estimates, bytes.

    Attributes:
        device_bytes: parameters, optimizer, gradients, and one layer's attention over all tokens
            (MLP and logits in tiles).
        host_bytes: every layer's input.
        fits: the machine of the prediction holds it.
    """

    device_bytes: int
    host_bytes: int
    fits: bool


def ordinary_training(planner: Planner, prediction: Prediction) -> OrdinaryTraining:
    """What the same step would take that way."""
    tracer, machine = planner.tracer, prediction.machine
    needed = layerwise_bytes(
        prediction.num_tokens * prediction.batch_size,
        layers=len(tracer.shapes),
        hidden_size=tracer.hidden_size,
        shape=tracer.shapes[0],
        element_bytes=torch.finfo(tracer.dtype).bits // 8,
    )
    device = prediction.held_bytes + tracer.gradient_bytes + needed.device_bytes
    host = needed.host_bytes
    fits = device <= machine.device_bytes and host <= machine.host_bytes
    if machine.device_type == "cpu":
        fits = device + host <= machine.device_bytes
    return OrdinaryTraining(device_bytes=device, host_bytes=host, fits=fits)
