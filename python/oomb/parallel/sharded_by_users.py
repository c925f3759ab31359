"""What an engine takes of models that came sharded: over which ranks, and what is tied."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from oomb.errors import UnsupportedModelError


def expect_mesh(model: nn.Module, members: list[int]) -> None:
    """Raise unless a model's shards lie on these ranks, in this order, as whole rows."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        theirs = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or theirs != members:
            raise UnsupportedModelError(
                f"{name}: expected weights sharded over the ranks {members} that share a sequence, "
                f"got a mesh {tuple(mesh.shape)} of ranks {theirs}; give fully_shard the mesh of "
                "the engine"
            )
        if placements != (Shard(0),):
            raise UnsupportedModelError(
                f"{name}: expected weights that fully_shard has sharded by rows, got placements "
                f"{placements}; tensor parallel models are not supported"
            )


def expect_ties(model: nn.Module) -> None:
    """Raise where weights that a model ties have become shards apart from each other."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, other in tied.items():
        one, two = named.get(name), named.get(other)
        if one is not two and isinstance(one, DTensor) and isinstance(two, DTensor):
            raise UnsupportedModelError(
                f"{name}: expected one parameter with {other}, as the model ties them, got two: "
                "fully_shard made shards of each; leave it whole by ignored_params of every call"
            )
