"""The attention of one layer in numbers: heads, what it sees, and what its pages hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Attention of one layer.

    Attributes:
        copies: ranks that hold the same keys and values.
        block: tokens see their own block of so many, which is a window as well; 0: no blocks.
        latent: numbers of a token that its keys and values are expanded from, where pages hold
            these; 0: pages hold keys and values.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int  # 0: unlimited
    source: int | None = None  # layer with attention whose keys and values it reads; None: its own
    copies: int = 1
    block: int = 0
    latent: int = 0

    @property
    def stored_heads(self) -> int:
        """Heads of a page. A latent is one, with a half of its numbers in place of keys and the
        other half in place of values."""
        return 1 if self.latent else self.kv_heads

    @property
    def stored_dim(self) -> int:
        """Head dim of a page."""
        return -(-self.latent // 2) or self.head_dim
