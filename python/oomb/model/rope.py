"""Rotary angles of a chunk that equal those of the whole call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from oomb.callers import warn_caller
from oomb.errors import UnsupportedModelError
from oomb.model.swap import Swaps, swapping

_CosSin = tuple[torch.Tensor, torch.Tensor]

_FAR = 1_000_000  # positions beyond which fp32 angles are worth a warning


def rotary_modules(decoder: nn.Module) -> list[nn.Module]:
    """Modules that turn position ids into cos and sin."""
    return [m for m in decoder.modules() if type(m).__name__.endswith("RotaryEmbedding")]


@swapping
def angles_of_call(swaps: Swaps, decoder: nn.Module, largest_position: int, precision: str) -> None:
    """Compute angles as for a call whose largest position is given.

    Dynamic and long variants choose their frequencies by the largest position they are shown: it
    rides along as one more column, whose angles are dropped.

    Args:
        precision: ``"model"``, or ``"float64"`` for the product of position and frequency in fp64.
    """
    for module in rotary_modules(decoder):
        forward: Any = module.forward
        angles = _with_largest(module, forward, largest_position, precision)
        swaps.replace(module, "forward", angles)


@torch.no_grad()
def _forget_longest(
    module: nn.Module, forward: Callable[..., _CosSin], x: torch.Tensor, positions: torch.Tensor
) -> None:
    """Dynamic variants keep the frequencies of the longest text until they see a short one."""
    kinds: Any = getattr(module, "rope_type", None)
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if "dynamic" in str(kind):
            keywords = {} if layer_type is None else {"layer_type": layer_type}
            forward(x, torch.zeros_like(positions[..., :1]), **keywords)


def _with_largest(
    module: nn.Module, forward: Callable[..., _CosSin], largest: int, precision: str
) -> Callable[..., _CosSin]:
    fresh = False

    def angles(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **keywords: Any) -> _CosSin:
        nonlocal fresh
        if not fresh:
            _forget_longest(module, forward, x, position_ids)
            fresh = True
        # [B, T], or [3, B, T] where a model that also sees pictures counts time, height and width
        last = position_ids.new_full((*position_ids.shape[:-1], 1), largest)
        both = forward(x, torch.cat((position_ids, last), dim=-1), *args, **keywords)
        if isinstance(both, torch.Tensor):  # complex numbers, whose angles these are
            return both[..., :-1, :]
        cos, sin = both
        cos, sin = cos[..., :-1, :], sin[..., :-1, :]
        if precision == "model":
            return cos, sin
        return _in_float64(module, position_ids, cos, args, keywords)

    return angles


def _in_float64(
    module: nn.Module,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> _CosSin:
    layer_type = keywords.get("layer_type") or (args[0] if args else None)
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(module, f"{prefix}inv_freq").double().to(cos.device)
    scaling = getattr(
        module, f"{prefix}attention_scaling", getattr(module, "attention_scaling", 1.0)
    )
    if position_ids.ndim == cos.ndim:  # time, height and width: alike in text
        position_ids = position_ids[0]
    freqs = position_ids[..., None].double() * frequencies
    if cos.shape[-1] == 2 * freqs.shape[-1]:
        freqs = torch.cat((freqs, freqs), dim=-1)
    return (freqs.cos() * scaling).to(cos.dtype), (freqs.sin() * scaling).to(cos.dtype)


def check_float64_angles(decoder: nn.Module) -> None:
    """Refuse ``rope_angles="float64"`` where a model lays its angles out in another way.

    Raises:
        UnsupportedModelError: the fp64 angles of small positions differ from the model's own.
    """
    device = next(decoder.parameters()).device
    positions = torch.arange(64, device=device)[None]
    x = torch.zeros(1, 1, dtype=torch.float32, device=device)
    for module in rotary_modules(decoder):
        for layer_type in getattr(module, "layer_types", None) or [None]:
            keywords = {} if layer_type is None else {"layer_type": layer_type}
            try:
                own = module(x, positions, **keywords)
                ours = _in_float64(module, positions, own[0], (), keywords)
                same = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, ours, strict=True))
            except (AttributeError, RuntimeError, TypeError):
                same = False
            if not same:
                raise UnsupportedModelError(
                    f"{type(module).__name__}: rope_angles='float64' does not know its layout"
                )


def positions(config: PreTrainedConfig) -> int | None:
    """Positions that a model is made for, scaling included; None where it does not say."""
    text: Any = config.get_text_config()
    declared: int | None = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None) or {}
    factor = parameters.get("factor")
    if declared is None or not isinstance(factor, (int, float)):
        return declared
    original = parameters.get("original_max_position_embeddings") or declared
    return max(declared, int(factor * original))


def warn_of_unknown_positions(largest_position: int, config: PreTrainedConfig) -> bool:
    """Warn of positions that the model was not made for; returns whether so."""
    made_for = positions(config)
    if made_for is None or largest_position < made_for:
        return False
    warn_caller(
        f"position {largest_position}: the model's config declares {made_for}, so it has not seen "
        "such; extend them in its config, for example with rope_parameters of rope_type 'yarn' "
        "(oomb train: model.rope)"
    )
    return True


def warn_of_far_positions(largest_position: int) -> bool:
    """Warn where fp32 products of position and frequency are off by much; returns whether so."""
    if largest_position <= _FAR:
        return False
    error = 2.0 ** (math.floor(math.log2(largest_position)) - 24)  # half a unit of the last place
    warn_caller(
        f"position {largest_position}: the model computes rotary angles in fp32, off by up to "
        f"{error:.2f} rad here; rope_angles='float64' computes them exactly"
    )
    return True
