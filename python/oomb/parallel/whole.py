"""Shards of FSDP2 and the whole tensors they are of: made, gathered, loaded, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank has a part of some of a model's weights."""
    return has_shards(model.parameters())


def has_shards(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether each rank has a part of some of these."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    apart: Collection[nn.Parameter] = (),
) -> None:
    """Shard a model over ranks: each layer, then the rest; what is left goes to the mesh's device.

    A layer goes to the device as a whole and leaves its rows there, so no rank's device ever holds
    more than its shards and one layer. FSDP2 wants one dtype in a group: parameters of another
    than most values have, such as adapters in fp32, stay whole. So do those that layers share with
    each other or with the rest: it would make shards of each use of them.

    Args:
        model: on the CPU, or on the mesh's device.
        mesh: one dimension.
        apart: parameters outside the layers that stay whole.
    """
    from torch.distributed.fsdp import fully_shard  # FSDP2 is for those who use it

    inside = {module for layer in layers for module in layer.modules()}
    outside = (module for module in model.modules() if module not in inside)
    beside = [p for module in outside for p in module.parameters(recurse=False)]
    _, whole = groups_and_whole([list(layer.parameters()) for layer in layers], beside, apart)
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    for parameter in whole:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(mesh.device_type)


def groups_and_whole(
    layers: Sequence[Sequence[nn.Parameter]],
    beside: Sequence[nn.Parameter],
    apart: Collection[nn.Parameter] = (),
) -> tuple[list[list[nn.Parameter]], set[nn.Parameter]]:
    """Parameters that are sharded together, those of each layer and the rest; those that are not.

    Args:
        layers: parameters of each.
        beside: used outside of layers.
    """
    users = [dict.fromkeys(of_user) for of_user in (*layers, beside)]
    counts = Counter(p for of_user in users for p in of_user)
    whole = {p for p, count in counts.items() if count > 1}.union(apart)
    groups = [[p for p in of_user if p not in whole] for of_user in users]
    return groups, whole.union(p for group in groups for p in _of_other_dtypes(group))


def _of_other_dtypes(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those of a group whose dtype is not that of most of its values: FSDP2 wants one."""
    values = Counter[torch.dtype]()
    for parameter in parameters:
        values[parameter.dtype] += parameter.numel()
    most = max(values, key=lambda dtype: values[dtype], default=None)
    return [p for p in parameters if p.dtype != most]


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: its memory, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# To whole tensors ---------------------------------------------------------------------------------


def expect_room(state: Mapping[str, Any]) -> None:
    """Take for a moment the memory in which the largest shards of a state become whole.

    Before a collective an error can be told to all; within it the others would wait for this rank.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """
    shards = [value for value in state.values() if isinstance(value, DTensor)]
    if shards:
        largest = max(shards, key=lambda value: value.numel() * value.element_size())
        own = largest.to_local()
        own.new_empty(largest.numel() + own.numel())


def gathered(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """A state in which shards are whole tensors on the CPU; every rank calls it.

    One tensor at a time is whole on the device. Tensors that share memory do so afterwards. Where
    the host's memory does not suffice, the error comes after the last tensor, so that this rank has
    helped the others to theirs.

    Args:
        state: of a model.
        keep: False: this rank only helps, and gets None where others get whole tensors.
    """
    copies = _Copies(keep)
    found = {name: copies.of(value) for name, value in state.items()}
    if copies.error is not None:
        raise copies.error
    return found


class _Copies:
    """Whole tensors in the host's memory, until one does not fit."""

    def __init__(self, keep: bool) -> None:
        self.error: Exception | None = None
        self._keep = keep
        self._known: dict[object, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        # A rank without rows cannot tell which are shared, so all ranks gather each.
        is_cut = isinstance(value, DTensor)
        return self._of_shards(value, value.full_tensor()) if is_cut else value

    def _of_shards(self, shards: DTensor, whole: torch.Tensor) -> torch.Tensor | None:
        if not self._keep or self.error is not None:
            return None
        local = shards.to_local()
        key = (local.data_ptr(), local.dtype, tuple(shards.shape)) if local.numel() else None
        found = self._known.get(key) if key is not None else None
        if found is not None:
            return found
        try:
            found = to_host(whole)
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            self.error = error
            self._known.clear()
            return None
        if key is not None:
            self._known[key] = found
        return found


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


# From whole tensors -------------------------------------------------------------------------------


def sharded_like(parameter: DTensor, whole: torch.Tensor) -> DTensor:
    """This rank's rows of a whole tensor, which every rank has, as those of a parameter."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@contextmanager
def loading_whole(model: nn.Module) -> Iterator[None]:
    """Inside, ``load_state_dict`` of a sharded model takes whole tensors."""

    def cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
                continue
            if value is not None and value.shape == parameter.shape:
                state[prefix + name] = sharded_like(parameter, value.to(parameter.dtype))

    hooks = [module.register_load_state_dict_pre_hook(cut) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Gradients ----------------------------------------------------------------------------------------


def clip_shards(
    parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip gradients, shards and whole ones, to a norm of them all.

    Returns:
        The norm before, 0-d, the same on every rank.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    shards = [grad for grad in grads if isinstance(grad, DTensor)]
    others = [grad for grad in grads if not isinstance(grad, DTensor)]
    norms = []
    for some in (shards, others):
        if some:
            norm: Any = torch.nn.utils.get_total_norm(some, norm_type)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        own_rows(grad).mul_(factor)
    return total
