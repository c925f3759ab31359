"""Attention of Hugging Face models, handed to the engine while it runs a call.

For the length of a call the model's config names the attention implementation ``"oomb"``, and
transformers' registry leads from there to the active handler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from oomb.errors import Error, UnsupportedModelError
from oomb.model.latent import Latent, taken
from oomb.model.swap import Swaps, swapping

NAME = "oomb"
UNKNOWN = -(2**62)  # of a mask: neither causal, nor a window, nor blocks
_NONE = -1  # of a row: it sees a later key, or not its own

# Keywords that carry nothing an attention function has to act on.
_INERT = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "logits_to_keep",
    ]
)


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention by a layer; q [B, Hq, C, D], k and v [B, Hkv, C, D], after RoPE.

    The head dim of v, and so of the result, may be another one.
    """

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int  # 0: unlimited
    softcap: float  # of the scaled logits; 0: none
    sinks: torch.Tensor | None  # [Hq] logits of the attention sink
    mask: torch.Tensor | None
    block: int = 0  # tokens see their own block of so many, counted from their document's first
    latent: Latent | None = None  # that k and v were expanded from

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Scaled logits under the call's soft cap."""
        return soft_capped(logits, self.softcap)


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(logits / cap)``; a cap of 0 leaves them."""
    return cap * torch.tanh(logits / cap) if cap else logits


# Takes a call, returns o as [B, Hq, C, D of v].
Handler = Callable[[AttentionCall], torch.Tensor]

# One process drives one GPU, and autograd may recompute a layer from another thread: plain globals.
_handler: Handler | None = None
_observer: Callable[[AttentionCall], None] | None = None
_mask_probe: Callable[..., torch.Tensor] | None = None
_THIS = sys.modules[__name__]


def placeholder_mask(device: torch.device) -> torch.Tensor:
    """The mask given to a decoder whose attention is the engine's.

    Having four dimensions it passes through transformers untouched: no mask is built, and nothing
    synchronises.
    """
    return torch.zeros(1, 1, 1, 1, device=device)


def in_autocast_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What torch's own attention makes of its inputs under autocast: rotation has left fp32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The engine's, by the name that transformers' registry knows: o [B, C, Hq, D of v]."""
    if _handler is None:
        raise RuntimeError("attention implementation 'oomb' was used outside an engine's call")
    where = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    for name, given in keywords.items():
        if name == "is_causal" and given in (None, True):
            continue
        if name not in _INERT and given is not None and given is not False:
            if _is_of_pairs(given, query, key):
                raise UnsupportedModelError(
                    f"{where}: asks attention for {name}, a value for each pair of query and key, "
                    "and the engine's attention adds nothing to their scores"
                )
            raise UnsupportedModelError(
                f"{where}: attention keyword {name}={_short(given)} is not supported"
            )
    if dropout:
        raise UnsupportedModelError(
            f"{where}: attention dropout {dropout} is not supported; load the model without, as "
            "in from_pretrained(…, attention_dropout=0.0), or set it to 0 in its config.json "
            "(GPT-2's name for it: attn_pdrop)"
        )
    if value.shape[:3] != key.shape[:3]:
        raise UnsupportedModelError(
            f"{where}: keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape"
        )
    if attention_mask is not None and attention_mask.numel() != 1:
        raise UnsupportedModelError(f"{where}: builds an attention mask of its own")
    latent = taken(module, key, value)
    query, key, value = in_autocast_dtype(query, key, value)
    call = AttentionCall(
        module=module,
        q=query,
        k=key,
        v=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
        sinks=s_aux,
        mask=attention_mask,
        latent=latent,
    )
    o = _handler(call)
    if _observer is not None:
        _observer(call)
    return o.transpose(1, 2), None


def _is_of_pairs(value: Any, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a keyword holds what scores of attention [B, H, C, keys] can be added to."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.ndim > 2 and value.shape[-2:] == (query.shape[2], key.shape[2])


def _short(value: Any) -> str:
    """A value in few words: what it is, where that is long."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def _mask(*args: Any, **keywords: Any) -> torch.Tensor | None:
    return None if _mask_probe is None else _mask_probe(*args, **keywords)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)


def _forget_calls() -> None:
    """In a forked process: a call of another thread stays with the parent."""
    global _handler, _observer, _mask_probe
    _handler = _observer = _mask_probe = None


os.register_at_fork(after_in_child=_forget_calls)


@swapping
def attention_handler(swaps: Swaps, decoder: nn.Module, handler: Handler) -> None:
    """Route the decoder's attention to ``handler``; outside, the model behaves as before."""
    if _handler is not None:
        raise Error("engine: expected one call at a time, got one inside or beside another")
    swaps.replace(_THIS, "_handler", handler)
    swaps.also(named_attention(decoder))


@swapping
def named_attention(swaps: Swaps, decoder: nn.Module, *others: Any) -> None:
    """The decoder's configs, and ``others``, name the engine's attention."""
    configs = {id(m.config): m.config for m in decoder.modules() if _names_attention(m)}
    for config in (configs | {id(other): other for other in others}).values():
        swaps.replace(config, "_attn_implementation_internal", NAME)


def _names_attention(module: nn.Module) -> bool:
    """Its config is a model's, not one of quantisation."""
    return hasattr(getattr(module, "config", None), "_attn_implementation_internal")


@swapping
def observed_attention(swaps: Swaps, observer: Callable[[AttentionCall], None]) -> None:
    """Show ``observer`` each call of attention behind its handler, where that did not raise."""
    swaps.replace(_THIS, "_observer", observer)


@swapping
def probed_masks(swaps: Swaps, probe: Callable[..., torch.Tensor]) -> None:
    """Make each mask what ``probe`` gives for its ``mask_function``."""
    swaps.replace(_THIS, "_mask_probe", probe)


def window_of_mask(*_: Any, mask_function: Callable[..., Any], **keywords: Any) -> torch.Tensor:
    """A mask [1, 1, 1, 1] for :func:`probed_masks` that says what a row sees: its window, 0 where
    unlimited; -n for blocks of n tokens; :data:`UNKNOWN` otherwise."""
    first = {row: _first_seen(mask_function, row) for row in (2**20, 2**20 + 1, 2**20 + 4097)}
    windows = {row - key + 1 for row, key in first.items()}
    seen = UNKNOWN
    if set(first.values()) == {0}:
        seen = 0
    elif len(windows) == 1 and _NONE not in first.values():
        seen = windows.pop()
    elif _NONE not in first.values():
        seen = -_block_of(mask_function, first[2**20]) or UNKNOWN
    return torch.full((1, 1, 1, 1), seen, device=keywords.get("device"))


def _block_of(mask_function: Callable[..., Any], border: int) -> int:
    """Tokens of a block, where rows see blocks one of which begins at ``border``; else 0."""
    if border == 0:
        return 0
    size = border - _first_seen(mask_function, border - 1)
    rows = (0, size - 1, size, border - 1, border, border + size - 1, border + size, 2**20 + 4097)
    fits = all(_first_seen(mask_function, row) == row // size * size for row in rows)
    return size if fits else 0


def _first_seen(mask_function: Callable[..., Any], row: int) -> int:
    """The first key that a row sees; all between that and its own are seen too."""

    def visible(key: int) -> bool:
        index = [torch.tensor(i) for i in (0, 0, row, key)]
        return bool(mask_function(*index))

    if visible(row + 1) or not visible(row):
        return _NONE
    if visible(0):
        return 0
    hidden, seen = 0, row
    while seen - hidden > 1:
        middle = (hidden + seen) // 2
        hidden, seen = (hidden, middle) if visible(middle) else (middle, seen)
    return seen
