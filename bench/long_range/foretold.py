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
    names: tuple[str, ...],
    *,
    length: int,
    page_size: int,
    seed: int,
    draws: int,
) -> dict[str, dict[str, float | None]]:
    """By method: error of the gradient; of page lists also the attention to the past that they
    hold; of sampled chunks the bias, which averaging leaves, and the noise of ``draws`` in it.

    On four texts with a question each; the loss is that of the answers. ``past``: of the layer
    that sees least. ``names``: methods that attend to pages of a budget, sweep in part or have
    gradient pages in bf16 (with keys in fp32, as on a CPU, their error is 0).
    """
    settings = methods(length, page_size, seed)
    rounded = "bf16 gradients"
    known = {n: own for n in names if n != rounded and (own := settings[n]) is not None}
    sparse = {n: own.attention for n, own in known.items() if _is_sparse(own)}
    parts: dict[str, Any] = {n: own.backward for n, own in known.items() if not _is_sparse(own)}
    [batch] = data.asked(task, 4, length, 4)
    ids, labels = (one.to(model.device) for one in (batch.input_ids, batch.labels))
    with autocast(model):
        found = audit(
            model,
            ids,
            labels,
            config=oomb.Config(**engine_settings(length, page_size)),
            attention=list(sparse.values()),
            backward=list(parts.values()),
            kv_grad_dtype="bfloat16" if rounded in names else None,
            draws=draws,
        )
    told: dict[str, dict[str, float | None]] = {}
    for one in found.sparse:
        seen = [layer.past_mass for layer in one.layers if layer.past_mass is not None]
        told[_named(sparse, one.rule)] = {
            "gradient": one.gradient.error,
            "past": min(seen, default=None),
        }
    for drawn in found.sampled:
        noise = 0.0 if drawn.exhaustive else drawn.gradient.spread / drawn.draws**0.5
        told[_named(parts, drawn.rule)] = {
            "gradient": drawn.gradient.error,
            "bias": drawn.gradient.bias,
            "noise": noise,
        }
    for cut in found.truncated:
        told[_named(parts, cut.rule)] = {"gradient": cut.gradient.error}
    if found.rounded is not None:
        told[rounded] = {"gradient": found.rounded.gradient.error}
    return told


def _is_sparse(config: oomb.Config) -> bool:
    return isinstance(config.attention, oomb.TopKPages)


def _named(rules: dict[str, Any], rule: object) -> str:
    return next(name for name, known in rules.items() if known is rule)
