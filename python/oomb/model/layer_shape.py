"""The attention of one layer in numbers: heads, what it sees, and what its pages hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb import _C
from oomb.model.interface import AttentionCall


@dataclass(frozen=True)
class LayerShape:
    """Attention of one layer.

    Attributes:
        head_dim: of queries, keys and values as kernels and pages have them.
        copies: ranks that hold the same keys and values.
        divided: they hold a part of these each, in place of all.
        block: tokens see their own block of so many, which is a window as well; 0: no blocks.
        latent: numbers of a token that its keys and values are expanded from, where pages hold
            these; 0: pages hold keys and values.
        groups: of the layer's heads, one of which this is; all of them stand in a row.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int  # 0: unlimited
    source: int | None = None  # layer with attention whose keys and values it reads; None: its own
    copies: int = 1
    divided: bool = False
    block: int = 0
    latent: int = 0
    groups: int = 1

    @property
    def stored_heads(self) -> int:
        """Heads of a page. A latent is one, with a half of its numbers in place of keys and the
        other half in place of values."""
        return 1 if self.latent else self.kv_heads

    @property
    def stored_dim(self) -> int:
        """Head dim of a page."""
        return -(-self.latent // 2) or self.head_dim


def kernel_head_dim(call: AttentionCall, capability: int | None) -> int:
    """Head dim that kernels and pages get in place of a call's, with zeros behind each head.

    That is the larger of those of keys and values. On a GPU it is the next one for which there are
    fast kernels: 192 and 128 of latent attention become 256. Weights in fp32 may be called under
    autocast, whose heads are those of its dtype; no kernel is fast in fp64.

    Args:
        capability: of the GPU, 90 for 9.0; None: a CPU.
    """
    widest = max(call.k.shape[3], call.v.shape[3])
    if capability is None or call.k.dtype == torch.float64:
        return widest
    return _C.attention_head_dim(widest, capability)


def compute_capability(device: torch.device) -> int | None:
    """Of a GPU, 90 for 9.0; None of another device."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
