"""Tracers of models, kept for as long as a model is what it was when it was traced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from oomb.model.causal import CausalModel
from oomb.trace.trace import Tracer

State = list[Any]

_MOST = 4  # of a model: in training and not, with its adapters and without
_DEPTH = 3  # containers inside containers that are looked into
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # hooks run no copy; the rest comes anyway

_kept: WeakKeyDictionary[nn.Module, list[tuple[State, Tracer]]] = WeakKeyDictionary()


def tracer_of(model: CausalModel) -> Tracer:
    """The model's tracer; a new one where its modules, weights or settings have changed.

    Models of equal structure do not share one: functions that their forwards find in other modules
    may be replaced in between, which no model tells.

    Raises:
        Exception: whatever the model raises where it is copied; nothing is kept then.
    """
    kept, state = _kept.setdefault(model.causal, []), _state(model)
    place = next((i for i, (known, _) in enumerate(kept) if known == state), None)
    if place is None:
        traced = Tracer(model.causal, model.device.type, model.is_fused, model.capability)
        kept.insert(0, (state, traced))
        del kept[_MOST:]
    else:
        kept.insert(0, kept.pop(place))
    return kept[0][1]


def _state(model: CausalModel) -> State:
    """What a trace can depend on and a user can change; never the model itself."""
    causal = model.causal
    tensors = chain(causal.parameters(), causal.buffers())
    return [
        model.device.type,
        model.is_fused,
        model.capability,
        _plain(vars(causal.config)),
        [(type(t), t.shape, t.dtype, t.requires_grad) for t in tensors],
        [(type(module), dict(_settings(module))) for module in causal.modules()],
    ]


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OF_TORCH:
            yield name, _plain(value)


def _plain(value: Any, depth: int = _DEPTH) -> Any:
    """A value that stays as it is when the original changes, and holds no model."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        return type(value).__name__, [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict) and depth:
        return {key: _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, partial) and depth:
        return [_plain(item, depth - 1) for item in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return _reference(value.__self__), _reference(value.__func__)
    return _reference(value) if callable(value) else type(value)


def _reference(value: Any) -> Any:
    """Equal to that of the same object alone; somebody's forward may hold the model."""
    try:
        return ref(value)
    except TypeError:
        return type(value)
