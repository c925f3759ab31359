"""Recurrences on tensors without memory: transformers' torch code loops over tokens, and kernels
of other packages (flash-linear-attention, mamba-ssm, causal-conv1d) read where no memory is.

What a recurrence saves for its backward and gives is counted; its own products are not, as they are
few beside the projections around it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from oomb.model.swap import Swaps, swapping

_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_SCANS = ("mamba2_chunk_scan",)


@swapping
def kernels_in_torch(swaps: Swaps, decoder: nn.Module) -> None:
    """Put transformers' own code in the place of functions that run another package's kernels."""
    for file in _modeling_files(decoder):
        for name, function in list(vars(file).items()):
            own = getattr(function, "__wrapped__", None)
            if callable(function) and getattr(own, "__module__", None) == file.__name__:
                swaps.replace(file, name, own)


@swapping
def recurrences_on_shapes(swaps: Swaps, decoder: nn.Module) -> None:
    """Put stand-ins in the place of the functions that transformers' layers call."""
    swaps.also(kernels_in_torch(decoder))
    for file in _modeling_files(decoder):
        for names, stand_in in ((_DELTA_RULES, _delta_rule), (_SCANS, _scan)):
            for name in names:
                if hasattr(file, name):
                    swaps.replace(file, name, stand_in)


def _modeling_files(decoder: nn.Module) -> list[ModuleType]:
    names = sorted({type(m).__module__ for m in decoder.modules()})
    return [sys.modules[name] for name in names if name.startswith("transformers.")]


def _delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **keywords: Any
) -> tuple[torch.Tensor, None]:
    """As without a cache: no state is asked for."""
    return _ran(value, query, key, *others, *keywords.values()), None


def _scan(hidden_states: torch.Tensor, *others: Any, **keywords: Any) -> torch.Tensor:
    return _ran(hidden_states, *others, *keywords.values())


def _ran(like: torch.Tensor, *others: Any) -> torch.Tensor:
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    output: torch.Tensor = _Recurrence.apply(like, *tensors)  # type: ignore[no-untyped-call]
    return output


class _Recurrence(torch.autograd.Function):
    """Keeps what it was given, and gives what has the shape of the first."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)
