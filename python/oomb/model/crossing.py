"""Where gradient goes from one token to another inside a layer, beside attention and mixers.

What works token by token multiplies the gradient of every other token by zero, exactly. Values tell
less: a softmax may be so sharp that each token sees itself alone. Then other tokens change nothing
that rounding would show, until training has made it less sharp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oomb.model.causal import CausalModel
from oomb.model.faults import is_models_own
from oomb.model.interface import AttentionCall
from oomb.model.observation import (
    Observation,
    first_of,
    given_to,
    hidden_in_session,
    replaced,
    reseed,
)

# Root mean square of hidden states. Attention that does not normalise them has small scores then;
# behind a norm nothing changes.
_QUIET = 0.1
# Tokens whose results are followed back. No block of 2 to 10 tokens begins with either.
_TOKENS = [11, 29]
# In place of weights that are all zero, as those of many branches are that training begins with:
# nothing would come through them.
_SMALL = 0.02


def crossings(
    model: CausalModel, ids: torch.Tensor, positions: torch.Tensor, own: Observation
) -> list[tuple[int, str]]:
    """Layers, and what of each depends on other tokens' hidden states: queries, keys, values, what
    a mixer is given, or the layer's output (``left``). Attention and mixers give what they gave in
    ``own``, so nothing comes through them.

    A layer through which autograd cannot go back is not looked at: it cannot be trained either.

    Args:
        ids: one row of at least 30 tokens.
    """
    found: list[tuple[int, str]] = []
    running = [0]
    leaves: list[torch.Tensor] = []  # of the layer that runs: its hidden states, what it was given

    def look(part: str, made: torch.Tensor) -> None:
        if _crosses(made, leaves):
            found.append((running[0], part))

    def attention(call: AttentionCall) -> torch.Tensor:
        # Here, not behind the layer: ranks may have given their weights back by then.
        for name, x in {"queries": call.q, "keys": call.k, "values": call.v}.items():
            look(name, x.transpose(1, 2).flatten(2))
        o = own.attended[model.layer_of(call.module)].o.to(call.q.dtype)
        shape = (*call.q.transpose(1, 2).shape[:3], call.v.shape[-1])
        attended: torch.Tensor = _given(o.reshape(shape), leaves)
        return attended.transpose(1, 2)

    def mixer(index: int, _: Callable[..., Any], args: Any, keywords: Any) -> Any:
        mixing = model.mixers[index]
        look(f"hidden states for {mixing.name}", mixing.given(args, keywords))
        return _given(own.mixed[index], leaves)

    def layer(index: int, forward: Callable[..., Any], args: Any, keywords: Any) -> Any:
        given = given_to(args, keywords)
        entered = own.entered[index].reshape(given.shape)
        rms = entered.float().square().mean().sqrt().clamp_min(1e-30)
        running[0] = index
        leaves.clear()
        with _nothing_zero(model.layers[index]):
            reseed(model, index)
            try:
                with torch.enable_grad():
                    quiet = _leaf((entered * (_QUIET / rms)).to(given.dtype), leaves)
                    ours, named = replaced(args, keywords, given, quiet)
                    output = forward(*ours, **named)
                    look("left", first_of(output))
                return output
            except Exception as error:
                if not is_models_own(error):
                    raise
        leaves.clear()
        return forward(*args, **keywords)

    with _without_backward_hooks(model.decoder):
        hidden_in_session(model, ids, positions, attention, layer, mixer)
    return found


def gradient_reaches(
    made: torch.Tensor, given: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Of each tensor the elements that gradient reaches from ``made``; None: there is no way."""
    if not made.requires_grad:
        return [None] * len(given)
    generator = torch.Generator().manual_seed(0)
    # Random: behind a norm the gradient of a plain sum is zero.
    d_made = torch.randn(made.shape, generator=generator).to(made)
    gradients = torch.autograd.grad(made, given, d_made, retain_graph=True, allow_unused=True)
    # NaN is not among them: zero divided by zero, say.
    return [None if one is None else one.abs() > 0 for one in gradients]


def _crosses(made: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Whether the gradient of some tokens of ``made`` reaches others of the leaves."""
    for reached in gradient_reaches(made[..., _TOKENS, :], leaves):
        if reached is not None:
            reached[..., _TOKENS, :] = False
            if bool(reached.any()):
                return True
    return False


def _given(values: Any, leaves: list[torch.Tensor]) -> Any:
    """Results of attention or of a mixer, one [B, T, …] or several, made of leaves."""
    if not isinstance(values, torch.Tensor):
        return type(values)(_given(x, leaves) for x in values)
    return _leaf(values.flatten(2), leaves).view(values.shape)


def _leaf(values: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The same values [..., T, features], made of a leaf."""
    leaf = values.detach().clone().requires_grad_(torch.is_grad_enabled())
    leaves.append(leaf)
    return leaf.clone()  # layers may change what they are given


@contextmanager
def _nothing_zero(layer: nn.Module) -> Iterator[None]:
    """Trained weights that are all zero have small random values meanwhile."""
    zero = [(p, p.detach().clone()) for p in layer.parameters() if _is_trained_and_zero(p)]
    try:
        for p, _ in zero:
            p.detach().normal_(std=_SMALL)
        yield
    finally:
        for p, value in zero:
            p.detach().copy_(value)


def _is_trained_and_zero(p: nn.Parameter) -> bool:
    """Of a part of a layer whose weights other ranks hold now, nothing can be said."""
    plain = type(p) in (torch.Tensor, nn.Parameter) and not p.is_inference()
    return p.requires_grad and plain and p.untyped_storage().nbytes() > 0 and not p.any()


@contextmanager
def _without_backward_hooks(decoder: nn.Module) -> Iterator[None]:
    """Hooks of users see the gradients of training alone."""
    names = ("_backward_hooks", "_backward_pre_hooks")
    kept = [(m, name, hooks) for m in decoder.modules() for name in names
            if (hooks := getattr(m, name))]  # fmt: skip
    try:
        for module, name, hooks in kept:
            setattr(module, name, type(hooks)())
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)
