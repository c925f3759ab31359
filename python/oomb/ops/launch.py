"""What a kernel launch takes from torch: a stream, and memory to work in."""

from __future__ import annotations

from collections.abc import Callable

import torch


def stream_of(device: torch.device) -> int:
    """Handle of torch's current stream on a CUDA device, 0 on the CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def workspace_on(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Makes a work space of as many bytes as a kernel asks for."""
    return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device)
