"""The other way to train on one GPU: whole layers, checkpointed, their inputs in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb.plan.planner import Planner
from oomb.plan.prediction import Prediction
from oomb.plan.trace import Setting


@dataclass(frozen=True, kw_only=True)
class OrdinaryTraining:
    """Ordinary training with checkpointing and layer inputs offloaded; estimates, bytes.

    Attributes:
        device_bytes: parameters, optimizer, gradients, and one layer's activations of all tokens
            (logits in slices).
        host_bytes: every layer's input.
        fits: the machine of the prediction holds it.
    """

    device_bytes: int
    host_bytes: int
    fits: bool


def ordinary_training(planner: Planner, prediction: Prediction) -> OrdinaryTraining:
    """What the same step would take that way."""
    tracer, machine = planner.tracer, prediction.machine
    tokens = prediction.num_tokens * prediction.batch_size
    layers, size = len(tracer.shapes), torch.finfo(tracer.dtype).bits // 8
    sample = min(prediction.config.chunk_size, prediction.num_tokens)
    keeping, recomputing = (
        tracer.trace(Setting(sample, 1, recompute, False)).sweep_peak_bytes
        for recompute in (False, True)
    )
    of_layer = max(0, keeping - recomputing) / max(1, layers - 1) / sample
    of_layer += 2 * tracer.hidden_size * size
    steady = prediction.held_bytes + tracer.gradient_bytes
    device = steady + int(tokens * of_layer)
    host = tokens * tracer.hidden_size * size * layers
    fits = device <= machine.device_bytes and host <= machine.host_bytes
    if machine.device_type == "cpu":
        fits = device + host <= machine.device_bytes
    return OrdinaryTraining(device_bytes=device, host_bytes=host, fits=fits)
