"""What a model's own attention function gives, beside what the engine's would for the same call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from oomb.model.interface import AttentionCall
from oomb.model.swap import Swaps, swapping

# Takes a call, the function's output [B, T, Hq, D], and whether it was computed in fp64.
Seen = Callable[[AttentionCall, torch.Tensor, bool], None]

# Implementations that know no fp64, or compile for every dtype they see.
_OF_ONE_DTYPE = ("flash", "flex", "paged", "kernels", "/")


@swapping
def watched_attention(swaps: Swaps, seen: Seen) -> None:
    """Show ``seen`` every call that models make of their own attention functions.

    Functions run in fp64 where they can, on the same values: rounding then hides nothing of what
    they compute.
    """
    interface: Any = AttentionInterface
    choose, look_up = interface.get_interface, interface.__getitem__

    def chosen(self: AttentionInterface, name: str, default: Any) -> Any:
        return _watched(choose(self, name, default), name, seen)

    def looked_up(self: AttentionInterface, name: str) -> Any:
        return _watched(look_up(self, name), name, seen)

    for name, own in (("get_interface", chosen), ("__getitem__", looked_up)):
        swaps.afterwards(partial(setattr, interface, name, getattr(interface, name)))
        setattr(interface, name, own)


def _watched(function: Any, name: str, seen: Seen) -> Any:
    if getattr(function, "is_watched", False):
        return function
    one_dtype = any(part in str(name) for part in _OF_ONE_DTYPE)

    def watched(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **keywords: Any,
    ) -> Any:
        exact = not one_dtype
        try:
            if one_dtype:
                raise TypeError
            output, *others = function(
                module, *_wide((query, key, value, *rest)), **dict(_wide_items(keywords))
            )
        except (RuntimeError, TypeError, ValueError):  # it knows no fp64
            exact = False
            output, *others = function(module, query, key, value, *rest, **keywords)
        scale = keywords.get("scaling")
        sinks = keywords.get("s_aux")
        call = AttentionCall(
            module=module,
            q=query,
            k=key,
            v=value,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=int(keywords.get("sliding_window") or 0),
            softcap=float(keywords.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach().clone(),  # weights may go again
            mask=None,
        )
        seen(call, output.reshape(*query.transpose(1, 2).shape[:3], -1), exact)
        return (output.to(query.dtype), *others)

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


def _wide(values: tuple[Any, ...]) -> list[Any]:
    floats = (isinstance(x, torch.Tensor) and x.is_floating_point() for x in values)
    return [x.double() if f else x for x, f in zip(values, floats, strict=True)]


def _wide_items(keywords: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return zip(keywords, _wide(tuple(keywords.values())), strict=True)


def plain_attention(call: AttentionCall) -> torch.Tensor:
    """What the engine computes for a call that holds whole sequences, [B, T, Hq, D] in fp64."""
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    group, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    row = torch.arange(tokens, device=q.device)
    distance = row[:, None] - row
    hidden = distance < 0
    if call.window:
        hidden |= distance >= call.window
    if call.block:
        hidden |= row[:, None] // call.block != row // call.block
    logits = call.capped(q @ k.transpose(2, 3) * call.scale).masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.double().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    return (logits.softmax(-1)[..., :tokens] @ v).transpose(1, 2)
