"""What ``oomb audit`` says of a model beforehand: to be compared with what it answers."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2ForCausalLM

import oomb
from oomb.audit import audit

from .data import Data
from .training import autocast, engine_settings, methods


def foretold(
    model: Qwen2ForCausalLM,
    data: Data,
    task: str,
    tried: tuple[str, ...],
    *,
    length: int,
    page_size: int,
) -> dict[str, dict[str, float | None]]:
    """By page-sparse method: error of the gradient, and attention to the past that its pages hold.

    On four texts with a question each; the loss is that of the answers. ``past``: of the layer
    that sees least.
    """
    known = methods(length, page_size, seed=0)
    rules = [(name, known[name]) for name in tried]
    sparse: dict[str, Any] = {name: own.attention for name, own in rules if own is not None}
    [batch] = data.asked(task, 4, length, 4)
    ids, labels = (one.to(model.device) for one in (batch.input_ids, batch.labels))
    with autocast(model):
        found = audit(
            model,
            ids,
            labels,
            config=oomb.Config(**engine_settings(length, page_size)),
            attention=list(sparse.values()),
        )
    told: dict[str, dict[str, float | None]] = {}
    for name, one in zip(sparse, found.sparse, strict=True):
        seen = [layer.past_mass for layer in one.layers if layer.past_mass is not None]
        told[name] = {"gradient": one.gradient.error, "past": min(seen, default=None)}
    return told
