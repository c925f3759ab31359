"""Kullback-Leibler divergence of a student's logits from a teacher's, a block of rows at a time.

For p the teacher's probabilities, q the student's, both at temperature T, and logits z of q:

    forward   Σ p log(p / q)  =: D     dD/dz = (q − p) / T
    reverse   Σ q log(q / p)  =: D     dD/dz = q (log(q / p) − D) / T

Of a teacher the k most likely tokens alone may be known. All others are then one outcome. That is
the divergence from a p that has these others in the student's own proportions, so both lines hold
for it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_VALUES = 2**25  # of logits that are looked at together

# log p [n, vocabulary] of rows (a slice), where the student's log q is the second argument.
Teacher = Callable[[slice, torch.Tensor], torch.Tensor]


def divergence(
    logits: torch.Tensor, teacher: Teacher, temperature: float, reverse: bool
) -> torch.Tensor:
    """[n] terms of the student's logits [n, vocabulary], fp32 or fp64."""
    terms: torch.Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        logits, teacher, temperature, reverse
    )
    return terms


class _Divergence(torch.autograd.Function):
    """The gradient is made with the terms, so one tensor of the logits' size is kept, not eight."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, teacher: Teacher, temperature: float, reverse: bool
    ) -> torch.Tensor:
        terms = torch.empty_like(logits[:, 0])
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for part in blocks(*logits.shape):
            log_q = _finite((logits[part] / temperature).log_softmax(-1))
            log_p = _finite(teacher(part, log_q))
            ratio = log_p - log_q
            if reverse:
                q = log_q.exp()
                terms[part] = -torch.linalg.vecdot(q, ratio)
                if gradient is not None:
                    gradient[part] = q * (-ratio - terms[part, None]) / temperature
            else:
                terms[part] = torch.linalg.vecdot(log_p.exp(), ratio)
                if gradient is not None:
                    gradient[part] = (log_q.exp() - log_p.exp()) / temperature
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_terms: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_terms[:, None], None, None, None


def completed(tokens: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log p [n, vocabulary] of a teacher of whom only some tokens are known.

    Args:
        tokens: [n, k], unlike each other in a row.
        log_p: [n, k + 1], of those, and of all others together.
        log_q: [n, vocabulary], the student's, whose proportions the others have.
    """
    others = others_than(tokens, log_q)
    return (log_q + (log_p[:, -1:] - others)).scatter(1, tokens, log_p[:, :-1])


def others_than(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, 1] log-sum-exp of values [n, vocabulary] at all but tokens [n, k]."""
    return values.scatter(1, tokens, -torch.inf).logsumexp(1, keepdim=True)


def blocks(rows: int, vocabulary: int) -> list[slice]:
    """Equal parts of rows of logits, of few enough values each."""
    step = max(1, _VALUES // vocabulary)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _finite(logp: torch.Tensor) -> torch.Tensor:
    """So that a probability of 0 times its logarithm is 0."""
    return logp.clamp_(min=torch.finfo(logp.dtype).min / 4)
