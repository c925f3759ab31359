"""Losses of per-token values, by one ordinary backward and in two passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import oomb
from oomb.engine.two_pass import TwoPass

from .reference import EXACT, Gradients, random_ids, relative_error, shifted, take_gradients

CONFIG = oomb.Config(chunk_size=16, page_size=8)
TOKENS = 75
IDS = random_ids(4, TOKENS)
LENGTHS = torch.tensor([75, 61, 40, 75])  # the longest is no multiple of a chunk
MASK = (torch.arange(TOKENS) < LENGTHS[:, None]).long()
LABELS = IDS.masked_fill(MASK == 0, -100)
LABELS[:, :9] = -100  # prompts
LABELS[1, :21] = -100
Values = dict[str, torch.Tensor]
Loss = Callable[[Values], torch.Tensor]


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OLD = -2 + 0.5 * _random(1, 4, TOKENS)
REFERENCE = -2 + 0.5 * _random(2, 4, TOKENS)
COUNTED = F.pad(LABELS[:, 1:] != -100, (1, 0))


def of_sequences(values: torch.Tensor) -> torch.Tensor:
    return (values * COUNTED).sum(1)


def dpo(a: Values) -> torch.Tensor:
    chosen, rejected = (of_sequences(a["logprobs"]) - of_sequences(REFERENCE)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo(a: Values) -> torch.Tensor:
    """Ratio, clipping, KL and a bonus of entropy; some tokens have no gradient at all."""
    advantages = torch.tensor([1.3, -0.4, 0.0, -0.9], dtype=torch.float64)[:, None]
    ratio = (a["logprobs"] - OLD).exp()
    clipped = ratio.clamp(0.8, 1.2)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    difference = REFERENCE - a["logprobs"]
    kl = difference.exp() - difference - 1
    terms = policy + 0.04 * kl - 0.3 * a["entropies"]
    return (of_sequences(terms) / COUNTED.sum(1)).mean()


def kto(a: Values) -> torch.Tensor:
    rewards = of_sequences(a["logprobs"]) - of_sequences(REFERENCE)
    baseline = rewards.detach().mean().clamp(min=0)
    wanted = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    return (1 - torch.sigmoid(0.1 * wanted * (rewards - baseline))).mean()


def rloo(a: Values) -> torch.Tensor:
    advantages = torch.tensor([0.5, -1.5, 2.0, -1.0], dtype=torch.float64)
    ratio = (of_sequences(a["logprobs"]) - of_sequences(OLD)).mul(0.01).exp()
    return -(ratio * advantages).mean()


def entropy(a: Values) -> torch.Tensor:
    return of_sequences(a["entropies"] ** 2).sum()


def contrastive(a: Values) -> torch.Tensor:
    """Mean-pooled embeddings of pairs, with the others of the batch as negatives."""
    mask = MASK[:, :, None].double()
    pooled = F.normalize((a["hidden"] * mask).sum(1) / mask.sum(1), dim=-1)
    left, right = pooled.chunk(2)
    return F.cross_entropy(left @ right.T / 0.05, torch.arange(2))


def last_token(a: Values) -> torch.Tensor:
    """Reward of a row is a product with its last hidden state; beside it the log-probabilities."""
    head = _random(3, a["hidden"].shape[-1])
    rewards = a["hidden"][torch.arange(4), LENGTHS - 1] @ head
    return -F.logsigmoid(rewards[:2] - rewards[2:]).mean() - 0.1 * a["logprobs"].mean()


LOSSES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "dpo": (dpo, ("logprobs",)),
    "grpo": (grpo, ("logprobs", "entropies")),
    "kto": (kto, ("logprobs",)),
    "rloo": (rloo, ("logprobs",)),
    "entropy": (entropy, ("entropies",)),
    "contrastive": (contrastive, ("hidden",)),
    "last-token": (last_token, ("logprobs", "hidden")),
}


def ordinary_values(
    model: Any, temperature: float, *, labels: torch.Tensor = LABELS, **arguments: Any
) -> Values:
    """Of one forward of the model, with its graph."""
    arguments = {"input_ids": IDS, "attention_mask": MASK, **arguments}
    output = model(**arguments, use_cache=False, output_hidden_states=True)
    logp = F.log_softmax(output.logits / temperature, dim=-1)
    targets = shifted(labels)
    counted = targets != -100
    at_target = logp.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0] * counted
    entropies = -(logp.exp() * logp).sum(-1) * counted
    scaled = output.logits / temperature
    statistics = {
        "mean_logits": scaled.mean(-1) * counted,
        "is_top1": (scaled.argmax(-1) == targets) & counted,
        "log_sum_sq_probs": (2 * logp).logsumexp(-1) * counted,
    }
    return {
        **{name: F.pad(value[:, :-1], (1, 0)) for name, value in statistics.items()},
        "logprobs": F.pad(at_target[:, :-1], (1, 0)),
        "entropies": F.pad(entropies[:, :-1], (1, 0)),
        "hidden": output.hidden_states[-1],
    }


def ordinary(model: Any, loss: Loss, temperature: float = 1.0, **arguments: Any) -> Gradients:
    model.zero_grad()
    loss(ordinary_values(model, temperature, **arguments)).backward()
    return take_gradients(model)


def wanted(names: tuple[str, ...]) -> dict[str, bool]:
    return {name: name in names for name in ("logprobs", "entropies", "hidden")}


def values_of(call: TwoPass) -> Values:
    found = {"logprobs": call.logprobs, "entropies": call.entropies, "hidden": call.hidden}
    return {name: value for name, value in found.items() if value is not None}


def two_passes(
    engine: oomb.Engine, loss: Loss, names: tuple[str, ...] = ("logprobs",), **arguments: Any
) -> oomb.Stats:
    arguments = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK, **arguments}
    with engine.two_pass(**arguments, **wanted(names)) as call:
        loss(values_of(call)).backward()
        return call.sweep()


def assert_close(found: Gradients, expected: Gradients, tolerance: float = EXACT) -> None:
    assert set(found) == set(expected)
    errors = {name: relative_error(found[name], g) for name, g in expected.items()}
    assert max(errors.values()) <= tolerance, errors
