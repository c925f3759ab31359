"""Nested states (optimizer, schedule, random generators) as JSON and safetensors: no pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oomb.checkpoint.manifest import CheckpointError
from oomb.neighbours import neighbours_within

# A dict with one such key stands for what JSON has no word for.
_TENSOR, _TUPLE, _PAIRS, _PARTS, _DTYPE = "$tensor", "$tuple", "$pairs", "$parts", "$dtype"

# Tensors that are made of others: states in 8, 4 and 8 bits of torchao's optimizers. A file can
# name no other class.
_OF_PARTS = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def save_state(folder: Path, name: str, state: Any, *, shard_bytes: int = 2 << 30) -> None:
    """Write ``name.json`` and, where the state holds tensors, ``name-00001.safetensors`` and so on.

    Args:
        state: dicts, lists and tuples of tensors, numbers, strings, bools and None.
        shard_bytes: of tensors in one file: host memory that writing takes, about twice over.

    Raises:
        CheckpointError: the state holds something else; the message says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = packed(state, name, tensors)
    (folder / f"{name}.json").write_text(json.dumps(tree))
    for number, names in enumerate(pieces(tensors, shard_bytes), start=1):
        shard = {key: _own_copy(tensors[key]) for key in names}
        save_file(shard, folder / f"{name}-{number:05d}.safetensors")


def load_state(folder: Path, name: str, *, copy: bool = True) -> Any:
    """What :func:`save_state` was given; tensors are on the CPU.

    Args:
        copy: False: tensors are maps of the files, read where they are touched: for a state that
            moves to a GPU and may be larger than the host's memory.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{name}-*.safetensors")):
        tensors.update(load_file(path))
    if copy:
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    return unpacked(json.loads((folder / f"{name}.json").read_text()), tensors)


def pieces(tensors: dict[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, as many at a time as fit; at least one."""
    return neighbours_within(shard_bytes, tensors, lambda name: tensors[name].nbytes)


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU with a storage of its own: safetensors refuses tensors that share one."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def packed(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A state as JSON has it; its tensors are put into ``tensors``, by their place in it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    kind = type(value)
    if _OF_PARTS.get(kind.__name__) == kind.__module__:
        names, attributes = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        whole = [kind.__name__, list(value.shape), list(attributes), parts]
        return {_PARTS: packed(whole, where, tensors)}
    if isinstance(value, torch.Tensor):
        tensors[where] = value
        return {_TENSOR: where}
    if isinstance(value, (list, tuple)):
        items = [packed(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        items = [
            [packed(key, f"{where} key", tensors), packed(item, f"{where}.{key}", tensors)]
            for key, item in value.items()
        ]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {_PAIRS: items}
    raise CheckpointError(
        f"{where}: expected tensors, numbers, strings, lists and dicts, got {type(value).__name__}"
    )


def unpacked(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that :func:`packed` made a tree and tensors of."""
    if isinstance(tree, list):
        return [unpacked(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _DTYPE in tree:
        return getattr(torch, tree[_DTYPE])
    if _PARTS in tree:
        return _of_parts(*unpacked(tree[_PARTS], tensors))
    if _TUPLE in tree:
        return tuple(unpacked(item, tensors) for item in tree[_TUPLE])
    if _PAIRS in tree:
        return {_key(key): unpacked(item, tensors) for key, item in tree[_PAIRS]}
    return {key: unpacked(item, tensors) for key, item in tree.items()}


def _of_parts(
    kind: str, shape: list[int], attributes: list[Any], parts: dict[str, torch.Tensor]
) -> torch.Tensor:
    if kind not in _OF_PARTS:
        raise CheckpointError(f"a state: expected one of {', '.join(_OF_PARTS)}, got {kind!r}")
    try:
        made: Any = getattr(import_module(_OF_PARTS[kind]), kind)
    except ImportError as error:
        raise CheckpointError(
            f"a state of torchao's optimizers ({kind}): expected torchao to be installed: {error}"
        ) from error
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    whole: torch.Tensor = made.__tensor_unflatten__(parts, attributes, size, stride)
    return whole


def _key(key: Any) -> Any:
    return unpacked(key, {})
