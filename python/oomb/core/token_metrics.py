"""What the logits of counted tokens say beside the loss: entropy, and how often they are right."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_VALUES = 2**25  # of logits that are widened at a time


@dataclass
class TokenMetrics:
    """Sums over the tokens of a call.

    Attributes:
        entropy: 0-d fp64, of their distributions, in nats.
        right: 0-d int64, tokens that are the most likely one.
        count: tokens.
    """

    entropy: torch.Tensor
    right: torch.Tensor
    count: int = 0

    @staticmethod
    def none_yet(device: torch.device) -> TokenMetrics:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return TokenMetrics(zero, torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [rows, vocabulary], and the token that each row predicts."""
        self.count += len(targets)
        rows = max(1, _VALUES // logits.shape[1])
        for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
            wide = torch.float64 if part.dtype == torch.float64 else torch.float32
            logp = part.log_softmax(-1, dtype=wide)
            self.right += (logp.argmax(-1) == target).sum()
            logp.clamp_(min=torch.finfo(wide).min)  # times a probability of 0 it is 0
            self.entropy -= torch.linalg.vecdot(logp.exp(), logp).sum(dtype=torch.float64)
