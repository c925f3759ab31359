"""Weights that rank 0 alone has read: the others' model has none, and gets its rows of each.

rank 0     weights on the CPU ── shard ── own rows ─╮ a tensor at a time, whole on the device
others     the meta device ───── shard ── no memory ╰──▶ own rows
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from oomb.parallel.job import Job

Place = tuple[str, str]  # a module's name, and what it calls the tensor


@contextmanager
def from_first(model: nn.Module, job: Job, device: torch.device) -> Iterator[None]:
    """Around sharding a model; afterwards ranks that had no weights have their rows of rank 0's.

    Buffers and tensors that modules keep as attributes are rank 0's too. Does nothing where all
    ranks have weights. Every rank of the job calls it.

    Args:
        model: the same on all ranks; on ranks other than the first it may be on the meta device.
        device: where shards lie.

    Raises:
        ValueError: rank 0 has no weights, or a rank has a model of other parameters.
    """
    bare = job.collect(lambda: any(parameter.is_meta for parameter in model.parameters()))
    if not any(bare):
        yield
        return
    if bare[0]:
        raise ValueError("model: expected weights on rank 0, got a model on the meta device")
    shapes, dtypes = job.by_first(lambda: (_shapes(model), _dtypes(model)))
    job.together(lambda: _take_structure(model, shapes, dtypes, job.rank))
    weights: dict[str, Any] = model.state_dict() if job.is_first else {}
    beside = job.by_first(lambda: {place: (t.cpu(), t.device.type) for place, t in _beside(model)})
    yield
    # Who has no memory for shards says so before the others wait for it in a broadcast.
    job.together(lambda: None if job.is_first else _take_memory(model, beside, device))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def _shapes(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of each parameter under each of its names: the first of them, and its shape."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: (first.setdefault(p, name), tuple(p.shape)) for name, p in named}


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def _take_structure(
    model: nn.Module,
    shapes: dict[str, tuple[str, tuple[int, ...]]],
    dtypes: dict[str, torch.dtype],
    rank: int,
) -> None:
    """Check names, shapes and which weights are one; take dtypes, which a file may decide.

    Raises:
        ValueError: names the first parameter that differs.
    """
    own = _shapes(model)
    for name in [*shapes, *own]:
        if shapes.get(name) != own.get(name):
            raise ValueError(
                f"model: expected on rank {rank} the parameters of rank 0, which has {name} as "
                f"{shapes.get(name)}, got {own.get(name)} (first name, shape)"
            )
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _take_memory(
    model: nn.Module, beside: dict[Place, tuple[torch.Tensor, str]], device: torch.device
) -> None:
    """Shards without values, and rank 0's tensors beside them with the type of their device."""
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((module, name))
    model.to_empty(device=device)  # which makes a parameter for each use
    for (first, its_name), *others in uses.values():
        for module, name in others:
            module._parameters[name] = first._parameters[its_name]
    for (name, attribute), (tensor, kind) in beside.items():
        module = model.get_submodule(name)
        to = device if attribute in module._buffers or kind != "cpu" else torch.device("cpu")
        setattr(module, attribute, tensor.to(to))


def _beside(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Buffers, saved or not, and tensors that are attributes of modules."""
    for name, module in model.named_modules():
        for attribute, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor):
                yield (name, attribute), value
