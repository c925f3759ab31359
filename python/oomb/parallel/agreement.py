"""What ranks of one sequence must have alike: arguments, settings, weights."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from oomb.parallel.failure import Failure

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def arguments_text(arguments: Mapping[str, Any]) -> dict[str, str]:
    """A text per argument that differs where the argument does; tensors by their bytes."""
    return {name: _text(value) for name, value in arguments.items()}


def model_text(model: nn.Module) -> dict[str, str]:
    """Texts of a model's parameters: which there are, and checksums of their values."""
    parameters = list(model.named_parameters())
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    with torch.no_grad():
        # Of shards nothing is the same; but each weight is on one rank alone then.
        sums = [_checksum(p) for _, p in parameters if not isinstance(p, DTensor)]
        values = torch.stack(sums).tolist() if sums else []
    return {
        "model": _digest(repr((type(model).__name__, model.training, shapes)).encode()),
        "weights of the model": _digest(repr(values).encode()),
    }


def expect_own_device(
    collect: Callable[[Callable[[], tuple[str, str, str]]], list[tuple[str, str, str]]],
    members: list[int],
    mesh: torch.device,
    device: torch.device,
) -> None:
    """Raise unless a model is where the mesh is, and each rank has a GPU of its own, all alike.

    GPUs of another compute capability have other kernels, which may cut attention otherwise.

    Args:
        collect: what work returns on each rank, which all do.
        members: ranks of the job.
    """

    def place_of_gpu() -> tuple[str, str, str]:
        if mesh.type != device.type:
            raise ValueError(
                f"mesh: expected a mesh of the model's device type {device.type!r}, got "
                f"{mesh.type!r}"
            )
        if device.type != "cuda":
            return socket.gethostname(), "", ""
        gpu = torch.cuda.get_device_properties(device)
        return socket.gethostname(), str(gpu.uuid), f"{gpu.major}.{gpu.minor}"

    places = collect(place_of_gpu)
    if device.type != "cuda":
        return
    for rank, place in enumerate(places):
        if place in places[:rank]:
            other = members[places.index(place)]
            raise ValueError(
                f"mesh: expected a GPU for each rank, got ranks {other} and {members[rank]} with "
                f"one GPU of {place[0]}: start as many processes as there are GPUs, and load the "
                "model with device_map={'': LOCAL_RANK}"
            )
        if place[-1] != places[0][-1]:
            raise ValueError(
                "mesh: expected GPUs of one compute capability, got "
                f"{places[0][-1]} on rank {members[0]} and {place[-1]} on rank {members[rank]}"
            )


def expect_same(gathered: list[dict[str, str]], members: list[int]) -> None:
    """Raise unless all ranks say the same of each argument.

    Args:
        gathered: what each rank says.
        members: ranks of the job, in that order.

    Raises:
        ValueError: names the first argument that differs, and the ranks.
    """
    for name in dict.fromkeys(name for theirs in gathered for name in theirs):
        values = [theirs.get(name) for theirs in gathered]
        others = [rank for rank, value in zip(members, values, strict=True) if value != values[0]]
        if others:
            text = (
                f"{name}: expected the same on all ranks of a sequence, got another on rank"
                f"{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} than on rank "
                f"{members[0]}"
            )
            failure = Failure(members[0], ValueError.__name__, text)
            raise failure.known_to_all(ValueError(text))


def _checksum(weight: torch.Tensor) -> torch.Tensor:
    """Sum of the bits, which no order of addition changes."""
    words = weight.detach().contiguous().view(-1).view(_WORDS[weight.element_size()])
    return words.sum(dtype=torch.int64)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        data = whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return f"{whole.dtype} {tuple(whole.shape)} {_digest(data)}"
    return repr(value)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
