"""What an engine takes of models that came sharded: over which ranks, and what is tied."""

from __future__ import annotations

from typing import Any

import torch
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
    """Raise where trained weights that a model ties have become shards apart from each other."""
    base: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT has one
    tied_now: Any = getattr(base, "get_expanded_tied_weights_keys", None)
    tied: dict[str, str] = tied_now(all_submodels=True) if callable(tied_now) else {}
    named = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in base.named_parameters(remove_duplicate=False)
    }
    for name, other in tied.items():
        one, two = named.get(name), named.get(other)
        if one is two or not (isinstance(one, DTensor) and isinstance(two, DTensor)):
            continue
        own, others = one.to_local(), two.to_local()
        # Who has untied them has other values; shards of one weight are alike on some rank.
        alike = own.numel() > 0 and torch.equal(own, others)
        if alike and (one.requires_grad or two.requires_grad):
            raise UnsupportedModelError(
                f"{name}: expected one parameter with {other}, as the model ties them, got two: "
                "fully_shard made shards of each; leave it whole by ignored_params of every call"
            )
