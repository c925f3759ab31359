"""Ordinary training of a model, and comparison of chunked training with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import oomb

from .models import VOCABULARY

EXACT = 1e-12
Gradients = dict[str, torch.Tensor]


@dataclass
class Result:
    """Loss and gradients of one call; ``step`` is the engine's own result."""

    loss: torch.Tensor
    gradients: Gradients
    step: oomb.Step | None = None


def random_ids(batch: int, tokens: int, seed: int = 5) -> torch.Tensor:
    """Token ids without the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)


def shifted(labels: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Target of each position; -100 at the end and where the next token starts a document."""
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    if starts is not None:
        targets[:, :-1][starts[:, 1:]] = -100
    return targets


def ordinary(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    loss_weights: torch.Tensor | None = None,
    num_items_in_batch: float | None = None,
    **arguments: Any,
) -> Result:
    """One ordinary forward and backward; the loss in the logits' dtype, at least fp32.

    Args:
        starts: [batch, tokens] bool, first tokens of documents.
        arguments: given to the model as they are.
    """
    model.zero_grad()
    logits = model(input_ids=input_ids, use_cache=False, **arguments).logits
    if logits.dtype != torch.float64:
        logits = logits.float()
    targets = shifted(labels, starts)
    terms = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    ).view_as(targets)
    if loss_weights is not None:
        terms = terms * shifted(loss_weights).to(terms.dtype)
    divisor = num_items_in_batch or int((targets != -100).sum())
    loss = terms.sum() / divisor
    loss.backward()
    return Result(loss.detach(), take_gradients(model))


def chunked(
    model: nn.Module,
    config: oomb.Config,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    switches: dict[str, object] | None = None,
    **arguments: Any,
) -> Result:
    """The same through an engine made for this one call."""
    model.zero_grad()
    with oomb.Engine(model, config) as engine:
        engine._pools.test_switches = switches or {}
        step = engine.forward_backward(input_ids, labels, **arguments)
    return Result(step.loss, take_gradients(model), step)


def take_gradients(model: nn.Module) -> Gradients:
    """Gradients by name; the model is left without."""
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """‖value − expected‖ / ‖expected‖; without a norm to divide by, ‖value‖."""
    difference = float((value.double() - expected.double()).norm())
    norm = float(expected.double().norm())
    return difference / norm if norm > 0 else difference


def worst_error(value: Result, expected: Result) -> tuple[float, str]:
    """The largest relative error of the loss and of every parameter's gradient."""
    assert set(value.gradients) == set(expected.gradients)
    errors = [(relative_error(value.loss, expected.loss), "loss")]
    for name, gradient in expected.gradients.items():
        errors.append((relative_error(value.gradients[name], gradient), name))
    return max(errors)


def assert_equal(value: Result, expected: Result, tolerance: float = EXACT) -> None:
    """Loss and every parameter's gradient agree to ``tolerance``, relative."""
    error, where = worst_error(value, expected)
    assert error <= tolerance, f"{where}: relative error {error:.2e} > {tolerance:.0e}"


def assert_identical(value: Result, expected: Result) -> None:
    """Loss and every gradient have the same bits."""
    assert set(value.gradients) == set(expected.gradients)
    assert torch.equal(value.loss, expected.loss)
    different = [
        name for name, g in expected.gradients.items() if not torch.equal(value.gradients[name], g)
    ]
    assert not different
