"""Grad mode and autocast, which torch keeps per thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

_DEVICES = ("cpu", "cuda")


def kept_modes() -> Callable[[], None]:
    """Sets them again as they are now."""
    grad = torch.is_grad_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _DEVICES
    ]
    cached = torch.is_autocast_cache_enabled()
    nesting = _autocast_nesting()

    def restore() -> None:
        torch.set_grad_enabled(grad)
        for kind, dtype, enabled in autocast:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_cache_enabled(cached)
        while _autocast_nesting() > nesting:  # else casts of weights would be kept for ever
            torch.autocast_decrement_nesting()

    return restore


def _autocast_nesting() -> int:
    """How many autocast contexts lie around this line; torch tells it to who enters one."""
    return torch.autocast_increment_nesting() and torch.autocast_decrement_nesting()
