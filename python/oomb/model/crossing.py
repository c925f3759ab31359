"""Where gradient goes from one token to another inside a layer, beside attention and mixers.

What works token by token multiplies the gradient of every other token by zero, exactly. Values tell
less: a softmax may be so sharp that each token sees itself alone. Then other tokens change nothing
that rounding would show, until training has made it less sharp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oomb.model.causal import CausalModel
from oomb.model.interface import AttentionCall
from oomb.model.observation import Observation, first_of, given_to, replaced, reseed, substituted

# Root mean square of hidden states. Attention that does not normalise them has small scores then;
# behind a norm nothing changes.
_QUIET = 0.1


def crossings(
    model: CausalModel, ids: torch.Tensor, positions: torch.Tensor, own: Observation
) -> list[tuple[int, str]]:
    """Layers, and the part of each (``left``: its output), in which other tokens' hidden states
    reach a token's results. Attention and mixers give what they gave in ``own``.

    Args:
        ids: one row. The token looked at is in its middle.
    """
    token = ids.shape[-1] // 2
    parts: dict[str, torch.Tensor] = {}  # of the layer that runs
    found: list[tuple[int, str]] = []

    def attention(call: AttentionCall) -> torch.Tensor:
        for name, x in {"queries": call.q, "keys": call.k, "values": call.v}.items():
            parts[name] = x.transpose(1, 2).flatten(2)
        shape = (*call.q.transpose(1, 2).shape[:3], call.v.shape[-1])
        o = own.attended[model.layer_of(call.module)].o.to(call.q.dtype)
        return o.reshape(shape).clone().transpose(1, 2)

    def mixer(index: int, _: Callable[..., Any], args: Any, keywords: Any) -> Any:
        parts[f"hidden states for {model.mixers[index].name}"] = model.mixers[index].given(
            args, keywords
        )
        return substituted(own.mixed[index], own.mixed[index])

    def layer(index: int, forward: Callable[..., Any], args: Any, keywords: Any) -> Any:
        reseed(model, index)
        given = given_to(args, keywords)
        entered = own.entered[index].reshape(given.shape)
        rms = entered.float().square().mean().sqrt().clamp_min(1e-30)
        parts.clear()
        with torch.enable_grad():
            quiet = (entered * (_QUIET / rms)).to(given.dtype).requires_grad_()
            # A copy, since layers may change what they are given.
            args, keywords = replaced(args, keywords, given, quiet.clone())
            output = forward(*args, **keywords)
            parts["left"] = first_of(output)
            found.extend((index, name) for name, x in parts.items() if _crosses(x, quiet, token))
        return output

    places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    session = model.session(
        attention,
        layer,
        mixer,
        largest_position=int(positions.max()),
        rope_angles="model",
        places=lambda: places,
    )
    with torch.inference_mode(False), torch.no_grad(), session:
        reseed(model, -1)
        # Copies, since what an inference mode has made cannot be saved for backward.
        model.hidden(ids.clone(), positions.clone())
    return found


def gradient_reaches(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor | None:
    """Elements of ``given`` that gradient reaches from ``made``; None: it cannot go there."""
    if not made.requires_grad:
        return None
    generator = torch.Generator().manual_seed(0)
    # Random: behind a norm the gradient of a plain sum is zero.
    d_made = torch.randn(made.shape, generator=generator).to(made)
    try:
        (d_given,) = torch.autograd.grad(made, given, d_made, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # values were changed in place: it can be run, and training will tell
        return None
    return None if d_given is None else d_given.abs() > 0  # not NaN: zero divided by zero, say


def _crosses(made: torch.Tensor, given: torch.Tensor, token: int) -> bool:
    """Whether the gradient of a token of ``made`` reaches other tokens of ``given``."""
    reached = gradient_reaches(made[..., token, :], given)
    if reached is None:
        return False
    reached[..., token, :] = False
    return bool(reached.any())
