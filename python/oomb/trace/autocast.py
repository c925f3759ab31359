"""The caller's autocast, on tensors that stand for those of another device."""

from __future__ import annotations

import torch


def autocast_of_device(device_type: str) -> torch.autocast:
    """The caller's autocast state, on the tensors that stand for the device's."""
    enabled, dtype = autocast_state(device_type)
    return torch.autocast("cpu", dtype, enabled=enabled)


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
