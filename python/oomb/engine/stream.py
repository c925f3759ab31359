"""The stream that kernels of this call run on."""

from __future__ import annotations

import torch


def stream_of(device: torch.device) -> int:
    """Handle of torch's current stream on a CUDA device, 0 on the CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
