"""The ranks that torchrun has started, and what they decide together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oomb.parallel.group import PATIENCE, Ranks
from oomb.parallel.mesh import DIMENSION
from oomb.parallel.peers import ending_with, place_of_this

T = TypeVar("T")


def rank_of_job() -> int:
    """This process among those of the job; 0 where it runs alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or "0")


def ranks_in_job() -> int:
    """Processes of the job.

    Raises:
        ValueError: the environment says no number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    number = os.environ.get("WORLD_SIZE") or "1"  # set to nothing is not set
    if not number.isdecimal():
        raise ValueError(f"WORLD_SIZE: expected a number of processes, got {number!r}")
    return int(number)


def is_first() -> bool:
    """Whether this process speaks for the job: rank 0, or the only one."""
    return rank_of_job() == 0


def ranks_of_host() -> int:
    """Processes of the job that share this host's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or "1") if ranks_in_job() > 1 else 1


def expect_gpu_for_each() -> int:
    """The GPU of this rank.

    Raises:
        ValueError: more ranks on this host than GPUs.
    """
    local, gpus = int(os.environ.get("LOCAL_RANK") or "0"), torch.cuda.device_count()
    if local >= gpus:
        raise ValueError(
            f"torchrun --nproc-per-node: expected at most {gpus} processes on this host, a GPU "
            f"each, got at least {local + 1}"
        )
    return local


@contextmanager
def begun(device_type: str) -> Iterator[None]:
    """torch.distributed runs where torchrun has started several ranks.

    A rank's GPU is the current one from then on. What the caller has initialised stays.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: more ranks on this host than GPUs.
    """
    if ranks_in_job() == 1:
        yield
        return
    if device_type == "cuda":
        torch.cuda.set_device(expect_gpu_for_each())
    begins = not dist.is_initialized()
    if begins:
        dist.init_process_group("cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo")
    try:
        yield
    finally:
        if begins and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def ranks_of_job(device_type: str) -> Iterator[DeviceMesh | None]:
    """A mesh in which all ranks of the job share a sequence; None for a process of its own.

    Otherwise as :func:`begun`.
    """
    with begun(device_type):
        ranks = ranks_in_job()
        yield (
            None
            if ranks == 1
            else init_device_mesh(device_type, (ranks,), mesh_dim_names=(DIMENSION,))
        )


def of_ranks(mesh: DeviceMesh | None, value: Any) -> list[Any]:
    """A small value of each rank of a mesh of one dimension, in their order."""
    if mesh is None:
        return [value]
    values: list[Any] = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values


class Job:
    """All ranks of the job, or the one process there is; torch.distributed has begun.

    What is done here is small, and done in the same order by all. An error of one is raised by all.
    """

    def __init__(self) -> None:
        self.size = ranks_in_job()
        self.rank = rank_of_job()
        self._ranks: Ranks | None = None
        if self.size > 1:
            self._ranks = Ranks(list(range(self.size)), torch.device("cpu"), PATIENCE)

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, logs and saves."""
        return self.rank == 0

    def collect(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returned on each rank."""
        return [work()] if self._ranks is None else self._ranks.collect(work)

    def together(self, work: Callable[[], T]) -> T:
        """As :meth:`collect`, for what is this rank's alone."""
        return work() if self._ranks is None else self._ranks.together(work)

    def by_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returned on rank 0, which alone does it; small."""
        found: list[Any] = self.collect(lambda: work() if self.is_first else None)
        return found[0]  # type: ignore[no-any-return]

    def in_turns(self, work: Callable[[], T]) -> T:
        """What leaves files for the next: rank 0, then one rank of each other host, then all."""
        first_here = int(os.environ.get("LOCAL_RANK") or "0") == 0
        own = 0 if self.is_first else 1 if first_here else 2
        kept: list[T] = []
        for turn in range(3):
            self.together(lambda now=turn == own: kept.append(work()) if now else None)  # type: ignore[misc]
        return kept[0]

    @contextmanager
    def whole_or_ended(self, say: Callable[[str], None]) -> Iterator[None]:
        """Around all that a program does with the others: where one is killed, all end.

        Args:
            say: gets one line before this process ends.
        """
        if self._ranks is None:
            yield
            return
        with ending_with(self.collect(place_of_this), say):
            yield
            self.collect(lambda: None)  # nobody ends before all are done

    def close(self) -> None:
        """Leave the others."""
        if self._ranks is not None:
            self._ranks.close()
