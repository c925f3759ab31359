"""Processes of one job that run what a test sends them, each with its rank."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

ANSWER_SECONDS = 120.0
ANSWER_SECONDS_AFTER_AN_ERROR = 10.0  # what the others say may tell why

# Imported once, before processes are forked. The path of the tests is not theirs yet.
PRELOADED = [
    "oomb.engine.engine",
    "peft",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    *(f"transformers.models.{x}.modeling_{x}" for x in ("llama", "mistral", "qwen2", "qwen3")),
    "transformers.models.gpt_oss.modeling_gpt_oss",
]

# Which of four ranks share a sequence; the rank in a group is not the rank in the job.
MEMBERS = {2: [[0, 2], [1, 3]], 3: [[0, 1, 2]], 4: [[0, 1, 2, 3]], 8: [list(range(8))]}


class Died(AssertionError):
    """A process has ended without an answer."""


class World:
    """Ranks of one job on this machine, with gloo. A context manager.

    Args:
        size: number of ranks.

    Attributes:
        is_clean: every rank has answered what it was sent; what follows meets nothing of it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_clean = True
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = _free_port()
        self.processes = []
        self._pipes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def start(self, work: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> None:
        """Have ``work(rank, *arguments)`` run on the first ``ranks``; all of them by default."""
        self.is_clean = False
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(pickle.dumps((work, arguments)))

    def answers(self, ranks: int | None = None, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """What each returned; for a process that died, an instance of :class:`Died`.

        Raises:
            AssertionError: one has not answered, or has raised; tells of all of them.
        """
        results: list[Any] = []
        errors: list[str] = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(ANSWER_SECONDS_AFTER_AN_ERROR if errors else seconds):
                self._tell_where()
                errors.append(f"rank {rank} has not answered within {seconds} s: a hang")
                continue
            try:
                worked, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                worked, value = True, self._death_of(rank)
            results.append(value)
            if not worked:
                errors.append(f"rank {rank}:\n{value}")
        died = [value for value in results if isinstance(value, Died)]
        assert not errors, "\n".join([*errors, *map(str, died)])
        self.is_clean = not died
        return results

    def _death_of(self, rank: int) -> Died:
        process = self.processes[rank]
        process.join(5)  # its pipe is closed before it is gone
        return Died(f"rank {rank} ended with {process.exitcode}")

    def _tell_where(self) -> None:
        """Each rank writes the stacks of its threads to stderr."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    def run(self, work: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """:meth:`start`, then :meth:`answers`."""
        self.start(work, *arguments, ranks=ranks)
        return self.answers(ranks)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()


@contextmanager
def as_started(rank: int, ranks: int) -> Iterator[None]:
    """The environment that torchrun gives to a process; ``rank`` -1: one that runs alone."""
    given = {} if rank < 0 else {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Of this process, by the number of ranks that share a sequence.
meshes: dict[int, DeviceMesh] = {}
# Likewise, with one group alone where ``meshes`` has two: the others have no part, and leave their
# share of the cores to those that have.
one_group: dict[int, DeviceMesh] = {}


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun; accelerate warns where it lacks
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    for number, groups in MEMBERS.items():
        if number > size:
            continue
        if number * 2 == size:
            meshes[number] = DeviceMesh("cpu", groups, mesh_dim_names=("dp", "cp"))["cp"]
            one_group[number] = DeviceMesh("cpu", groups[0], mesh_dim_names=("cp",))
        else:
            meshes[number] = DeviceMesh("cpu", list(range(number)), mesh_dim_names=("cp",))
            one_group[number] = meshes[number]
    while True:
        try:
            work, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)  # the others may be gone already
        try:
            answer = True, work(rank, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
