"""Whose a checkpoint is."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_SAMPLE = 256  # leading elements of a frozen tensor that stand for all of it


def model_identity(model: nn.Module) -> dict[str, str]:
    """What a checkpoint and the model it is loaded into must agree on, as short texts.

    Class, names, shapes and dtypes of all parameters, which of them are trained; for adapters also
    a hash over samples of the frozen weights, which the checkpoint does not hold. Every rank of a
    sharded model calls it.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    parameters = list(model.named_parameters())
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters]
    identity = {
        "model": _class_of(base),
        "parameters": f"{sum(p.numel() for _, p in parameters):,} in {_digest(shapes)}",
        "trained": f"{len(trained)} tensors, {_digest(trained)}",
    }
    if base is not model:
        frozen = [p for _, p in parameters if not p.requires_grad]
        identity["frozen weights"] = _digest_of_samples(frozen)
    return identity


def _class_of(model: nn.Module) -> str:
    """The name of a model's class; FSDP2 puts one of its own before it."""
    kinds = [kind.__name__ for kind in type(model).__mro__]
    return next(name for name in kinds if not name.startswith("FSDP"))


def _digest(names: list[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _digest_of_samples(parameters: list[nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for part in _parts(whole.detach()):
            sample = part.reshape(-1)[:_SAMPLE].contiguous().cpu()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _parts(value: Any) -> list[torch.Tensor]:
    """What a tensor is made of: torchao's of codes and scales."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
