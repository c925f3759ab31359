"""Process groups of the engine's own, made directly over the job's store.

A process forked from a rank's own has its groups without their threads, for which a destructor
would wait for ever. So there none is ever destroyed.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

_CONNECTS = timedelta(minutes=2)  # once all ranks are there

_made: WeakSet[Any] = WeakSet()


def gloo(name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A group whose ranks are there: to connect takes them no longer than that."""
    store = c10d._get_default_store()
    notes = c10d.PrefixStore(f"{name}/notes", store)
    group = dist.ProcessGroupGloo(notes, rank, size, min(timeout, _CONNECTS))
    try:
        group._set_default_timeout(timeout)
    except (AttributeError, RuntimeError):  # older torch
        again = c10d.PrefixStore(f"{name}/again", store)
        group = dist.ProcessGroupGloo(again, rank, size, timeout)
    _made.add(group)
    return group


def on_gpus(name: str, rank: int, members: list[int], timeout: timedelta) -> tuple[Any, Any]:
    """Groups for tensors and for weights, which connect where they are first used."""
    tensors, weights = (
        _nccl(f"{name}/{use}", rank, members, timeout) for use in ("tensors", "weights")
    )
    return tensors, weights


def _nccl(name: str, rank: int, members: list[int], timeout: timedelta) -> Any:
    store = c10d.PrefixStore(name, c10d._get_default_store())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if hasattr(options, "global_ranks_in_group"):
        options.global_ranks_in_group = members
    group = dist.ProcessGroupNCCL(store, rank, len(members), options)
    _made.add(group)
    return group


def options_of(options: Any, on_gpu: bool) -> Any:
    """On a GPU collectives run in the current stream, where torch can have them there."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = not on_gpu
    return options


def own_connection() -> Any:
    """The job's store through a connection that blocks nobody else."""
    store: Any = c10d._get_default_store()
    with suppress(RuntimeError, AttributeError):  # not every kind of store can
        return store.clone()
    return store


def _keep_all() -> None:
    for group in _made:  # a reference that nobody owns also outlives Python's own exit
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_all)
