"""Nested states (optimizer, schedule, random generators) as JSON and safetensors: no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oomb.train.checkpoint.manifest import CheckpointError

# A dict with one such key stands for what JSON has no word for.
_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"


def save_state(folder: Path, name: str, state: Any) -> None:
    """Write ``name.json`` and, where the state holds tensors, ``name.safetensors``.

    Args:
        state: dicts, lists and tuples of tensors, numbers, strings, bools and None.

    Raises:
        CheckpointError: the state holds something else; the message says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _packed(state, name, tensors)
    (folder / f"{name}.json").write_text(json.dumps(tree))
    if tensors:
        save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str) -> Any:
    """What :func:`save_state` was given; tensors are on the CPU."""
    path = folder / f"{name}.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return _unpacked(json.loads((folder / f"{name}.json").read_text()), tensors)


def _packed(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        # Its own storage: safetensors refuses tensors that share one.
        tensors[where] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: where}
    if isinstance(value, (list, tuple)):
        items = [_packed(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        items = [
            [_packed(key, f"{where} key", tensors), _packed(item, f"{where}.{key}", tensors)]
            for key, item in value.items()
        ]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {_PAIRS: items}
    raise CheckpointError(
        f"{where}: expected tensors, numbers, strings, lists and dicts, got {type(value).__name__}"
    )


def _unpacked(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpacked(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(_unpacked(item, tensors) for item in tree[_TUPLE])
    if _PAIRS in tree:
        return {_key(key): _unpacked(item, tensors) for key, item in tree[_PAIRS]}
    return {key: _unpacked(item, tensors) for key, item in tree.items()}


def _key(key: Any) -> Any:
    return _unpacked(key, {})
