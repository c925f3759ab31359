"""Rows that are padded on the left, turned so that their padding is on the right."""

from __future__ import annotations

import torch


def left_padding(mask: torch.Tensor) -> torch.Tensor:
    """[B] int64: zeros of an attention mask [B, T] before each row's first one."""
    return (mask != 0).long().cumsum(1).eq(0).sum(1)


def turned(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rows [B, T], each turned to the left by so many places; what falls out comes in again."""
    places = torch.arange(rows.shape[1], device=rows.device)
    return rows.gather(1, (places + by[:, None]) % rows.shape[1])
