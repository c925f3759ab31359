"""Whether the loss of routers that a model adds to its own is the one that the engine computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.faults import models_own
from oomb.model.observation import undisturbed
from oomb.model.routers import COEFFICIENT, Routers, asks_for_router_loss, counted
from oomb.model.swap import Swaps

_ROWS, _TOKENS, _PADDING = 2, 16, 5  # of the forward that is looked at
_SAME = 1e-4  # relative; transformers adds in fp32. Another k or other tokens are 1e-2 off


def routers_of(model: CausalModel) -> Routers | None:
    """Routers whose load-balancing loss the model's own forward adds; None: it adds none.

    Raises:
        UnsupportedModelError: its config asks for a loss of its routers that is not this one.
    """
    causal: Any = model.causal
    if not asks_for_router_loss(causal):
        return None
    if not model.head.gives_logits:
        raise _refusal(model, "its head classifies sequences")
    settings = causal.config.get_text_config()
    owner = causal if hasattr(causal, COEFFICIENT) else settings
    best = getattr(causal, "num_experts_per_tok", None)
    best = getattr(settings, "num_experts_per_tok", None) if best is None else best
    if not isinstance(best, int) or not isinstance(getattr(owner, COEFFICIENT, None), int | float):
        raise _refusal(model, f"it has no num_experts_per_tok, or no {COEFFICIENT}")

    ids = torch.arange(_ROWS * _TOKENS, device=model.device).view(_ROWS, -1) % model.vocab_size
    mask = torch.ones_like(ids)
    mask[1, -_PADDING:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    failing = models_own(causal, "its own forward fails with output_router_logits=True")
    autocast = torch.autocast(model.device.type, enabled=False)
    with Swaps() as swaps, undisturbed(model), autocast, failing:
        swaps.replace(owner, COEFFICIENT, 1.0)  # makes the term as large as the loss
        own = causal(**given, output_router_logits=True)
        logits = own.logits if own.logits.dtype == torch.float64 else own.logits.float()
        plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        of_routers, given_loss = own.get("router_logits"), own.get("aux_loss")
        if not of_routers or not isinstance(given_loss, torch.Tensor):
            raise _refusal(model, "its own forward gives no aux_loss")
        experts = of_routers[0].shape[-1]
        if any(x.shape != (ids.numel(), experts) for x in of_routers):
            raise _refusal(model, "its routers differ in their number of experts")
        sums = [counted(x, best, mask.flatten() != 0) for x in of_routers]
    chosen, p = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    rows = int(mask.sum()) * len(of_routers)
    expected = experts * float((chosen * p).sum()) / rows**2
    if not abs(float(given_loss) - expected) <= _SAME * expected:
        reason = f"its forward gives {float(given_loss):.6g} where that is {expected:.6g}"
        raise _refusal(model, reason)
    whole = float(plain) + expected
    if not abs(float(own.loss) - whole) <= _SAME * whole:
        reason = f"with a coefficient of 1 its loss is {float(own.loss):.6g}, not {whole:.6g}"
        raise _refusal(model, reason)
    return Routers(len(of_routers), experts, best, of_routers[0].element_size(), owner)


def _refusal(model: CausalModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model.causal).__name__}: expected a router auxiliary loss "
        "(config.output_router_logits) that is transformers' load-balancing loss, got another: "
        f"{reason}; with output_router_logits=False in its config it trains without one"
    )
