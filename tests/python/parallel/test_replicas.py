"""Replicas add gradients: also where one has none."""

from __future__ import annotations

import torch
from torch import nn

from oomb.parallel.replicas import Replicas

from .world import World


def added(rank: int) -> torch.Tensor | None:
    replicas = Replicas(4, 1, torch.device("cpu"))
    parameter = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    if rank == 1:
        parameter.grad = torch.full((6,), 1 / 3)
    with replicas.step():
        replicas.add_gradients([parameter])
    return parameter.grad


def test_gradients_keep_a_dtype_of_their_own(world: World) -> None:
    for grad in world.run(added):
        assert grad is not None and torch.equal(grad, torch.full((6,), 1 / 3))
