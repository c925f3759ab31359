"""Mixers in fp32: whether stretches of tokens give what all give at once, with little rounding.

A model in bf16 rounds by 1 %, behind which an error of a state that is handed on could hide. The
same code on fp32 copies of weights and inputs shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomb.errors import Error
from oomb.model.faults import is_models_own, is_out_of_memory
from oomb.model.mixers import Mixer, States, joined
from oomb.model.swap import Swaps, swapping

_NARROW = (torch.bfloat16, torch.float16)


def mixed_in_fp32(
    mixer: Mixer, forward: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Its outputs for rows that go on from one another, and for all their tokens at once.

    Args:
        forward, args, keywords: of a call with the rows [B, T, hidden_size] as a batch.

    Returns:
        Two outputs of B * T tokens; None where its kernels or its weights know no fp32, or where
        there is no memory for the copies.
    """
    if not all(_is_plain(x) for x in mixer.module.parameters()):
        return None
    args, keywords = _wide(args), _wide(keywords)
    rows = mixer.given(args, keywords)
    try:
        with _wide_weights(mixer.module):
            outputs: list[Any] = []
            states: States | None = None
            for row in rows.split(1):
                output, states = mixer.stretch(forward, args, keywords, row, states)
                outputs.append(output)
            whole = rows.reshape(1, -1, rows.shape[-1])
            at_once, _ = mixer.stretch(forward, args, keywords, whole, None)
    except Exception as error:  # kernels assert, and compilers raise errors of their own
        ours_or_the_devices = isinstance(error, (Error, RuntimeError))
        if ours_or_the_devices and not (is_models_own(error) or is_out_of_memory(error)):
            raise
        return None
    return joined(outputs, dim=0), at_once


def _is_plain(weight: torch.Tensor) -> bool:
    """Neither packed nor sharded."""
    return weight.is_floating_point() and type(weight.data) is torch.Tensor


@swapping
def _wide_weights(swaps: Swaps, module: nn.Module) -> None:
    for part in module.modules():
        for named in (part._parameters, part._buffers):
            for name, x in list(named.items()):
                if x is not None and x.dtype in _NARROW:
                    wide = x.detach().float()
                    is_weight = named is part._parameters
                    swaps.replace_item(
                        named, name, nn.Parameter(wide, requires_grad=False) if is_weight else wide
                    )


def _wide(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.float() if x.dtype in _NARROW else x
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(_wide(part) for part in x)
    return {name: _wide(part) for name, part in x.items()} if isinstance(x, dict) else x
