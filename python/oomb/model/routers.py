"""Routers of a mixture of experts, as far as the load-balancing loss of transformers needs them.

With ``config.output_router_logits`` a model adds c · E · Σ_e f_e · P_e to its own loss. f_e is the
number of times that expert e is among the best k of a token, per token; P_e the mean of its
probability. Both are means over the tokens of all layers that are no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

COEFFICIENT = "router_aux_loss_coef"


@dataclass(frozen=True)
class Routers:
    """Routers of a model that adds the loss.

    Attributes:
        number: tensors of router logits that its decoder gives.
        experts, best: of a router, and how many of them a token goes to.
        size: bytes of a router logit.
        owner: what the model reads c from.
    """

    number: int
    experts: int
    best: int
    size: int
    owner: Any

    @property
    def coefficient(self) -> float:
        """c, as the model's own forward would read it now."""
        return float(getattr(self.owner, COEFFICIENT))

    def kept_bytes(self, tokens: int) -> int:
        """Logits of ``tokens`` tokens, and their gradients, until a chunk's backward is over."""
        return 2 * self.number * self.experts * self.size * tokens


def asks_for_router_loss(causal: Any) -> bool:
    """Whether its config makes a model add a loss of its routers."""
    configs = causal.config, causal.config.get_text_config()
    return any(getattr(config, "output_router_logits", False) for config in configs)


def counted(
    logits: torch.Tensor, best: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each expert is among a token's best, and the sum of its probabilities.

    Args:
        logits: [tokens, experts]; transformers compares probabilities in their dtype.
        mask: [tokens] bool, tokens that count; None: all.

    Returns:
        Both [experts] fp64.
    """
    p = logits.softmax(-1)
    chosen = torch.zeros_like(p).scatter_(1, p.topk(best, dim=-1).indices, 1.0)
    if mask is not None:
        chosen, p = chosen * mask[:, None], p * mask[:, None]
    return chosen.sum(0, dtype=torch.float64), p.sum(0, dtype=torch.float64)
