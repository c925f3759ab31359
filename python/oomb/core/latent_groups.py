"""Groups of pages of latents: what one product expands, and its backward.

Nothing here knows where pages are. So a plan runs the same on tensors without memory, and counts
what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb.model.latent import Expansion

SCRATCH_TOKENS = 8192  # of all sequences, that are expanded at once; at least one group of each


@dataclass(frozen=True)
class Expanded:
    """What a call expands of its past in the layer where that is most.

    Attributes:
        heads, width: of keys, those of this rank; as kernels have them.
        page_size: tokens.
        group: pages of a sequence that one product expands.
        at_once: pages of a sequence for whose keys and values there is scratch.
    """

    heads: int
    width: int
    page_size: int
    group: int
    at_once: int

    def scratch(self, batch: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory [pages, 2, heads, tokens of a page, width] for keys and values, or for their
        gradients, on the device of ``like``."""
        shape = (max(1, batch * self.at_once), 2, self.heads, self.page_size, self.width)
        return like.new_empty(shape, dtype=dtype)

    def scratch_bytes(self, batch: int, element_bytes: int) -> int:
        """Of keys and values, and of their gradients in fp32 at least."""
        numbers = 2 * batch * self.at_once * self.heads * self.page_size * self.width
        return numbers * (element_bytes + max(4, element_bytes))


def pages_at_once(batch: int, group: int, page_size: int) -> int:
    """Pages of each sequence that are expanded at once: whole groups of ``group`` pages."""
    return max(1, SCRATCH_TOKENS // (batch * group * page_size)) * group


def half_of(expansion: Expansion, page_size: int) -> int:
    """Elements of a page's first half, and of its second."""
    return page_size * -(-(expansion.rank + expansion.rope) // 2)


def gathered(
    rows: torch.Tensor, slots: torch.Tensor, expansion: Expansion, page_size: int
) -> torch.Tensor:
    """Vectors [B, 1, n * P, w] of pages; zeros where there is no page.

    Args:
        rows: [slots, at least both halves of a page].
        slots: [B, n] of the pages; negative: no page.
    """
    found = rows[:, : 2 * half_of(expansion, page_size)][slots.clamp_min(0).long()]
    found = torch.where(slots[..., None] < 0, 0, found)
    batch, number = slots.shape
    halves = found.view(batch, number, 2, page_size, -1)
    return halves.permute(0, 1, 3, 2, 4).reshape(batch, 1, number * page_size, -1)


def expanded(
    expansion: Expansion, vectors: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, H, T, width] of a group's vectors [B, 1, T, w], in their dtype."""
    with torch.no_grad():
        k, v = expansion(*_split(expansion, vectors))
        return _as_keys(k, vectors.dtype, width), _as_keys(v, vectors.dtype, width)


def propagated(
    expansion: Expansion, vectors: torch.Tensor, d_pages: torch.Tensor, factor: float
) -> torch.Tensor:
    """Gradient [B, 1, T, rank + rope] of a group's vectors; those of weights go to their sums.

    Args:
        vectors: [B, 1, T, w], of n pages of P tokens.
        d_pages: [B, n, 2, H, P, width] gradients of keys and values, to be times ``factor``.
    """
    dk, dv = d_pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    inputs = [x.detach().requires_grad_() for x in _split(expansion, vectors)]
    with torch.enable_grad():
        k, v = expansion(*inputs)
    roots = [(x[..., : y.shape[-1]] * factor).to(y.dtype) for x, y in ((dk, k), (dv, v))]
    torch.autograd.backward((k, v), [x.contiguous() for x in roots])
    return torch.cat([_gradient_of(x) for x in inputs], -1)


def _split(expansion: Expansion, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and rotated keys."""
    rank, rope = expansion.rank, expansion.rope
    latent, rotated, _ = vectors.tensor_split((rank, rank + rope), -1)
    # A product of other strides may round elsewhere, and these depend on the part.
    return latent.contiguous(), rotated.contiguous()


def _as_keys(x: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    missing = width - x.shape[-1]
    x = x.to(dtype)
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _gradient_of(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
