"""The ranks that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oomb.parallel.mesh import DIMENSION


def is_first() -> bool:
    """Whether this process speaks for the job: rank 0, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def ranks_of_job(device_type: str) -> Iterator[DeviceMesh | None]:
    """A mesh in which all ranks of the job share a sequence; None for a process of its own.

    A rank's GPU is the current one from then on. What the caller has initialised stays.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: more ranks on this host than GPUs.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield None
        return
    if device_type == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"torchrun --nproc-per-node: expected at most {gpus} processes on this host, a GPU "
                f"each, got at least {local + 1}"
            )
        torch.cuda.set_device(local)
    begins = not dist.is_initialized()
    if begins:
        dist.init_process_group("cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo")
    try:
        yield init_device_mesh(device_type, (ranks,), mesh_dim_names=(DIMENSION,))
    finally:
        if begins:
            dist.destroy_process_group()


def of_ranks(mesh: DeviceMesh | None, value: Any) -> list[Any]:
    """A small value of each rank, in their order."""
    if mesh is None:
        return [value]
    values: list[Any] = [None] * mesh.size()
    dist.all_gather_object(values, value)
    return values
