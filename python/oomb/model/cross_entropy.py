"""Cross-entropy and its gradient in one kernel, in place of the logits.

torch's own takes six passes over logits in fp32; this one reads them twice and writes them once, in
the model's dtype. Between, all is fp32.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

_BLOCK, _WARPS = 8192, 16  # logits of a row that a program holds at a time


def has_kernel(device: torch.device) -> bool:
    """Whether :func:`softmax_gradient_` can run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


def softmax_gradient_(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
    """Replace each row of logits by ``scale * (softmax - one at its target)``.

    Args:
        logits: [rows, vocabulary], contiguous rows; overwritten.
        targets: [rows] int64 in [0, vocabulary).

    Returns:
        [rows] fp32: each row's cross-entropy, not scaled.
    """
    return launch(logits, targets, scale, _BLOCK, _WARPS)


def launch(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, block: int, warps: int
) -> torch.Tensor:
    """:func:`softmax_gradient_` with a given block and number of warps."""
    from oomb.model.cross_entropy_kernel import cross_entropy  # needs Triton

    rows, vocabulary = logits.shape
    terms = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy[(rows,)](
        logits, targets, terms, scale, logits.stride(0), vocabulary, block, num_warps=warps
    )
    return terms
