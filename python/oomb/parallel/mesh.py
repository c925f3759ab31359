"""The argument ``mesh`` of an engine: which ranks share a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from oomb.errors import Error
from oomb.parallel.group import Ranks
from oomb.parallel.heads_over_ranks import HeadsOverRanks
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights

DIMENSION = "cp"


def weights_of(model: Any, policy: str, placement: Placement) -> Weights:
    """How the ranks of a sequence hold a model's weights: whole, or shards of FSDP2.

    Raises:
        UnsupportedModelError: shards that these ranks cannot gather.
        ValueError: some ranks have shards and some have not.
    """
    sharded = isinstance(model, torch.nn.Module) and any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
    placement.expect_same(lambda: {"model": f"sharded: {sharded}"})
    if not sharded or not isinstance(placement, HeadsOverRanks):
        return Weights()
    from oomb.parallel.sharding import ShardedWeights  # FSDP2 is for those who use it

    with placement.call():  # no agreement: ranks that gather do not hear of one that failed
        weights = ShardedWeights(model, placement.group, policy)
        placement.settle(lambda: None)
        return weights


def placement_of(mesh: Any) -> Placement:
    """Where the parts of a sequence are.

    Args:
        mesh: a DeviceMesh with the one dimension ``"cp"``; None: this process runs alone.

    Raises:
        ValueError: it is no such mesh, or this rank is not in it; says what to give instead.
    """
    if mesh is None:
        return Placement()
    if not hasattr(mesh, "mesh_dim_names"):
        raise ValueError(
            "mesh: expected a torch.distributed.device_mesh.DeviceMesh with a dimension 'cp', got "
            f"{type(mesh).__name__}; make one with init_device_mesh('cuda', (ranks,), "
            "mesh_dim_names=('cp',))"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise Error("mesh: expected torch.distributed to be initialised; start with torchrun")
    names = tuple(mesh.mesh_dim_names or ())
    if DIMENSION not in names:
        raise ValueError(
            f"mesh: expected a dimension named 'cp', got {names or 'none with a name'}; make it "
            "with mesh_dim_names=('cp',)"
        )
    others = [name for i, name in enumerate(names) if name != DIMENSION and mesh.size(i) > 1]
    if others:
        raise ValueError(
            f"mesh: expected the dimension 'cp' alone, got also {', '.join(others)}; give the "
            "engine mesh['cp'], and average gradients over the other dimensions yourself"
        )
    members = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    if dist.get_rank() not in members:
        raise ValueError(
            f"mesh: expected one that holds this rank {dist.get_rank()}, got ranks {members}"
        )
    if len(members) == 1:
        return Placement()
    return HeadsOverRanks(Ranks(members, torch.device(mesh.device_type)))
