"""Losses that are sums over tokens of a function of the logits, against ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import oomb
from oomb.core import loss as loss_module

from .models import VOCABULARY, make
from .reference import EXACT, random_ids, relative_error, shifted, take_gradients

TOKENS = 75
IDS = random_ids(2, TOKENS)
LABELS = IDS.clone()
LABELS[0, :20] = -100
LABELS[1, 50:60] = -100
WEIGHTS = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
# A teacher's best logits for each token, stored at the token that they predict.
TOP = torch.randn(2, TOKENS, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TOP_IDS = torch.rand(2, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(3)).topk(5)[1]
CONFIG = oomb.Config(chunk_size=16, page_size=8)
Terms = Callable[[torch.Tensor, oomb.TokenRows], torch.Tensor]


def distillation(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
    """KL from the student's choice among the teacher's best tokens, at a temperature."""
    at = rows.sequences, rows.positions
    student = F.log_softmax(logits.gather(1, TOP_IDS[at]) / 2, dim=-1)
    teacher = F.log_softmax(TOP[at] / 2, dim=-1)
    return 4 * F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)


def smoothing(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
    return F.cross_entropy(logits, rows.targets, reduction="none", label_smoothing=0.1)


def z_loss(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
    plain = F.cross_entropy(logits, rows.targets, reduction="none")
    return plain + 1e-2 * logits.logsumexp(-1) ** 2


def focal(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
    logp = -F.cross_entropy(logits, rows.targets, reduction="none")
    return -((1 - logp.exp()) ** 2) * logp


def ordinary(model: Any, terms: Terms, weights: torch.Tensor | None) -> torch.Tensor:
    """Loss of one forward and backward."""
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    targets = shifted(LABELS)
    sequences, positions = (targets != -100).nonzero(as_tuple=True)
    rows = oomb.TokenRows(targets[sequences, positions], sequences, positions + 1)
    values = terms(logits[sequences, positions], rows)
    if weights is not None:
        values = values * weights[sequences, positions + 1]
    loss = values.sum() / len(values)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "terms", [distillation, smoothing, z_loss, focal], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_one_backward(terms: Terms, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "slice_rows", lambda *_: 13)
    model = make("cohere")
    weights = WEIGHTS if weighted else None
    loss = ordinary(model, terms, weights)
    expected = take_gradients(model)
    with oomb.Engine(model, CONFIG) as engine:
        step = engine.forward_backward(IDS, LABELS, loss_weights=weights, token_loss=terms)
    found = take_gradients(model)
    assert relative_error(step.loss, loss) <= EXACT
    assert set(found) == set(expected)
    assert max(relative_error(found[n], g) for n, g in expected.items()) <= EXACT


def test_logits_are_wide_and_the_kernel_of_the_plain_loss_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []

    def terms(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
        seen.append(logits.detach())
        return z_loss(logits, rows)

    monkeypatch.setattr(loss_module.ChunkLoss, "_has_kernel", lambda _: True)
    with oomb.Engine(make("qwen3", torch.bfloat16), CONFIG) as engine:
        engine.forward_backward(IDS, LABELS, token_loss=terms)
    assert sum(len(x) for x in seen) == int((LABELS[:, 1:] != -100).sum())
    assert {x.dtype for x in seen} == {torch.float32}


@pytest.mark.parametrize(
    ("token_loss", "message"),
    [
        (3, "token_loss: expected"),
        (lambda logits, rows: logits.sum(), r"token_loss: expected a .* got \(\)"),
        (lambda logits, rows: None, "token_loss: expected a .* got NoneType"),
        (lambda logits, rows: rows.targets, r"token_loss: expected a floating-point tensor"),
    ],
)
def test_what_is_no_term_for_each_row(token_loss: Any, message: str) -> None:
    model = make("llama")
    with oomb.Engine(model, CONFIG) as engine:
        with pytest.raises(ValueError, match=message):
            engine.forward_backward(IDS, LABELS, token_loss=token_loss)
        assert all(p.grad is None for p in model.parameters())
        engine.forward_backward(IDS, LABELS, token_loss=partial(z_loss))
