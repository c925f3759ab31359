"""Page lists of which ranks have a part each."""

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
