"""Page lists of which ranks have a part each, or those of some heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def closed_up(lists: torch.Tensor) -> torch.Tensor:
    """Int lists [..., n] with their pages in front, ascending, and -1 behind."""
    most = torch.iinfo(lists.dtype).max
    ascending = torch.where(lists < 0, most, lists).sort(dim=-1).values
    return torch.where(ascending == most, -1, ascending)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Lists [..., n] of all pages in ``parts``, which have no more than n together."""
    return closed_up(torch.cat(list(parts), dim=-1))[..., : parts[0].shape[-1]].contiguous()


def of_all_heads(of_ranks: Sequence[torch.Tensor], copies: int, *, parted: bool) -> torch.Tensor:
    """Lists of all heads, of which ``copies`` neighbours have the same ones or a part each."""
    groups = [of_ranks[first : first + copies] for first in range(0, len(of_ranks), copies)]
    if not parted:
        return torch.cat([group[0] for group in groups], dim=2)
    return torch.cat([joined(group) for group in groups], dim=2)
