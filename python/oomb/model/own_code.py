"""Attention modules with attention code of their own, run through transformers' interface.

Falcon makes queries, keys and values, attends and projects in one forward, which asks nobody for
an attention function. For the length of a call another forward stands there: the same parts with
the interface's function between them. The check at construction compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from oomb.errors import UnsupportedModelError
from oomb.model.interface import AttentionCall, attention
from oomb.model.own_attention import Seen
from oomb.model.swap import Swaps, swapping

_FALCON = "transformers.models.falcon.modeling_falcon"


def interface_forwards(decoder: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """A forward through the interface for each attention module that has own code.

    Raises:
        UnsupportedModelError: somebody has put another forward on one of them.
    """
    found: dict[nn.Module, Callable[..., Any]] = {}
    for module in _falcons(decoder):
        forward = partial(_falcon, module)
        there = vars(module).get("forward", forward)
        if getattr(there, "func", None) is not _falcon:  # a call that is still open has put ours
            name = next(name for name, part in decoder.named_modules() if part is module)
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}): expected the forward of its class, which the "
                "engine takes the place of, got another one on the module (a hook's or a "
                "wrapper's); take it away, or wrap the whole layer"
            )
        found[module] = forward
    return found


@swapping
def watched_code(swaps: Swaps, decoder: nn.Module, seen: Seen) -> None:
    """Show ``seen`` every call of attention that such modules compute by themselves."""
    for module in _falcons(decoder):
        watch = _Watch(module, seen)
        parts = (
            (module, watch.whole),
            (module.query_key_value, watch.projection),
            (module.dense, watch.behind),
        )
        for part, watched in parts:
            swaps.replace(part, "forward", partial(watched, part.forward))


def refuse_alibi(decoder: nn.Module, where: str) -> None:
    """Refuse transformers' models with ALiBi; ``where`` names a layer.

    Raises:
        UnsupportedModelError: it is one.
    """
    kind = type(decoder)
    if not kind.__module__.startswith("transformers."):
        return  # names tell less of others: the check at construction looks at what they compute
    always = any("alibi" in name for name in dir(kind))  # BLOOM, MPT: a method that builds it
    falcon = getattr(decoder, "use_alibi", False)  # a setting of its config
    if always or falcon:
        other = (
            "a release of it whose config says alibi=false"
            if falcon
            else "a model with rotary or learnt positions"
        )
        raise UnsupportedModelError(
            f"{where}: adds ALiBi, a bias that grows with the distance of two tokens, to the "
            f"scores of attention, and the engine's attention has no such bias: take {other}"
        )


def _falcons(decoder: nn.Module) -> list[Any]:
    """Its attention modules of Falcon's class, or of one made from it."""
    kind = getattr(sys.modules.get(_FALCON), "FalconAttention", ())
    return [module for module in decoder.modules() if isinstance(module, kind)]


def _falcon(
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = _heads(module, module.query_key_value(hidden_states), position_embeddings)
    # Of its own implementations this one alone drops weights, unless the model has ALiBi.
    drops = module.training and type(module).__name__ == "FalconFlashAttention2"
    dropout = module.config.attention_dropout if drops else 0.0
    o, _weights = attention(module, q, k, v, attention_mask, dropout=dropout)
    return module.dense(o.flatten(2)), None


def _heads(module: Any, fused: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, ...]:
    """Queries [B, H, T, D], keys and values [B, Hkv, T, D] of the one product that makes them."""
    if module.new_decoder_architecture:
        # A key head behind the queries that it serves; its own code copies it for each of these.
        of_key = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
        parts = of_key[..., :-2, :].flatten(2, 3), of_key[..., -2, :], of_key[..., -1, :]
    else:
        parts = module._split_heads(fused)
    q, k, v = (x.transpose(1, 2) for x in parts)
    q, k = sys.modules[_FALCON].apply_rotary_pos_emb(q, k, *rotary)
    return q, k, v


class _Watch:
    """One module's own forward, seen from the projections on both sides of its attention.

    Their values are those of the forward itself: adapters with dropout would give others when asked
    again.
    """

    def __init__(self, module: Any, seen: Seen) -> None:
        self._module, self._seen = module, seen
        self._fused = self._attended = torch.empty(0)

    def whole(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        output = forward(*args, **keywords)
        q, k, v = _heads(self._module, self._fused, keywords["position_embeddings"])
        call = AttentionCall(
            module=self._module,
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5,
            window=0,
            softcap=0.0,
            sinks=None,
            mask=None,
        )
        heads = self._attended.unflatten(-1, (q.shape[1], -1))
        self._seen(call, heads, q.dtype == torch.float64)
        return output

    def projection(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> torch.Tensor:
        self._fused = forward(*args, **keywords)
        return self._fused

    def behind(
        self, forward: Callable[..., Any], attended: torch.Tensor, *args: Any, **keywords: Any
    ) -> torch.Tensor:
        self._attended = attended
        output: torch.Tensor = forward(attended, *args, **keywords)
        return output
