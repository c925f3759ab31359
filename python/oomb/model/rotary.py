"""Rotation of queries and keys as one kernel that works in place, where Liger is installed.

transformers' own keeps four tensors of the queries' size for backward and takes ten kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from oomb.model.swap import Swaps, swapping

Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_NAME = "apply_rotary_pos_emb"
# Attention classes whose modeling file rotates by x * cos + rotate_half(x) * sin.
_ATTENTIONS = frozenset(
    [
        "Gemma2Attention",
        "Gemma3Attention",
        "GraniteAttention",
        "LlamaAttention",
        "MistralAttention",
        "MixtralAttention",
        "Qwen2Attention",
        "Qwen2MoeAttention",
        "Qwen3Attention",
        "Qwen3MoeAttention",
    ]
)


def modeling_files(decoder: nn.Module) -> list[ModuleType]:
    """Modeling files of the decoder whose rotation is known, and nobody's replacement."""
    names = {type(m).__module__ for m in decoder.modules() if type(m).__name__ in _ATTENTIONS}
    files = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.")]
    return [f for f in files if getattr(getattr(f, _NAME, None), "__module__", "") == f.__name__]


def fused_rotation(device: torch.device) -> Rotation | None:
    """Liger's kernel; None on the CPU or without Liger."""
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.rope import LigerRopeFunction  # optional

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated: tuple[torch.Tensor, torch.Tensor] = LigerRopeFunction.apply(q, k, cos, sin)
        return rotated

    return rotate


@swapping
def replaced_rotation(swaps: Swaps, files: Sequence[ModuleType], rotation: Rotation | None) -> None:
    """Rotate by ``rotation`` in these modeling files; afterwards all is as before."""
    if rotation is None:
        return
    for file in files:
        plain = getattr(file, _NAME)
        swaps.replace(file, _NAME, _where_whole_heads_rotate(rotation, plain))


def _where_whole_heads_rotate(rotation: Rotation, plain: Rotation) -> Rotation:
    def rotate(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *rest: Any,
        **kw: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fits = cos.shape[-1] == q.shape[-1] and q.dtype == cos.dtype and not rest and not kw
        return (rotation if fits else plain)(q, k, cos, sin, *rest, **kw)

    return rotate
