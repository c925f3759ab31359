"""Attention of Hugging Face models, handed to the engine while it runs a call.

The model is not patched: its config names the attention implementation ``"oomb"`` for the length of
a call, and transformers' registry leads from there to the active handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from oomb.errors import Error, UnsupportedModelError

NAME = "oomb"

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
    """One call of attention by a layer; q [B, Hq, C, D], k and v [B, Hkv, C, D], after RoPE."""

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int  # 0: unlimited
    sinks: torch.Tensor | None  # [Hq] logits of the attention sink
    mask: torch.Tensor | None


# Takes a call, returns o as [B, Hq, C, D].
Handler = Callable[[AttentionCall], torch.Tensor]

# One process drives one GPU, and autograd may recompute a layer from another thread: plain globals.
_handler: Handler | None = None
_observer: Callable[[AttentionCall], None] | None = None
_mask_probe: Callable[..., torch.Tensor] | None = None


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


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    if _handler is None:
        raise RuntimeError("attention implementation 'oomb' was used outside an engine's call")
    where = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    for name, given in keywords.items():
        if name == "is_causal" and given in (None, True):
            continue
        if name == "softcap" and given is not None:
            raise UnsupportedModelError(
                f"{where}: soft-capped attention (softcap={given}) is not supported; the model "
                "would be another one without its cap"
            )
        if name not in _INERT and given is not None and given is not False:
            raise UnsupportedModelError(
                f"{where}: attention keyword {name}={_short(given)} is not supported"
            )
    if dropout:
        raise UnsupportedModelError(
            f"{where}: attention dropout {dropout} is not supported; load the model without, as "
            "in from_pretrained(…, attention_dropout=0.0), or set it to 0 in its config.json "
            "(GPT-2's name for it: attn_pdrop)"
        )
    if value.shape != key.shape:
        raise UnsupportedModelError(
            f"{where}: keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape"
        )
    if attention_mask is not None and attention_mask.numel() != 1:
        raise UnsupportedModelError(f"{where}: builds an attention mask of its own")
    query, key, value = in_autocast_dtype(query, key, value)
    call = AttentionCall(
        module=module,
        q=query,
        k=key,
        v=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        sinks=s_aux,
        mask=attention_mask,
    )
    o = _handler(call)
    if _observer is not None:
        _observer(call)
    return o.transpose(1, 2), None


def _short(value: Any) -> str:
    """A value in few words: what it is, where that is long."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def _mask(*args: Any, **keywords: Any) -> torch.Tensor | None:
    return None if _mask_probe is None else _mask_probe(*args, **keywords)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def attention_handler(decoder: nn.Module, handler: Handler) -> Iterator[None]:
    """Route the decoder's attention to ``handler``; outside, the model behaves as before."""
    global _handler
    if _handler is not None:
        raise Error("engine: expected one call at a time, got a call inside another")
    given = (getattr(module, "config", None) for module in decoder.modules())
    # Other libraries' layers, such as torchao's, have configs of another kind.
    configs: dict[int, Any] = {id(c): c for c in given if isinstance(c, PretrainedConfig)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    _handler = handler
    try:
        for config in configs.values():
            config._attn_implementation_internal = NAME
        yield
    finally:
        _handler = None
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


@contextmanager
def observed_attention(observer: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Show ``observer`` each call of attention behind its handler, where that did not raise."""
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@contextmanager
def recorded_masks() -> Iterator[None]:
    """Make each mask a [1, 1, 1, 1] tensor that holds its window: 0 unlimited, -1 unknown shape."""
    global _mask_probe
    _mask_probe = _window_of_mask
    try:
        yield
    finally:
        _mask_probe = None


def _window_of_mask(*_: Any, mask_function: Callable[..., Any], **keywords: Any) -> torch.Tensor:
    windows = {_window_at(mask_function, row) for row in (2**20, 2**20 + 1, 2**20 + 4097)}
    window = windows.pop() if len(windows) == 1 else -1
    return torch.full((1, 1, 1, 1), window, device=keywords.get("device"))


def _window_at(mask_function: Callable[..., Any], row: int) -> int:
    """Keys up to and with its own that a row sees; 0: all."""

    def visible(key: int) -> bool:
        index = [torch.tensor(i) for i in (0, 0, row, key)]
        return bool(mask_function(*index))

    if visible(row + 1) or not visible(row):
        return -1
    if visible(0):
        return 0
    hidden, seen = 0, row
    while seen - hidden > 1:
        middle = (hidden + seen) // 2
        hidden, seen = (hidden, middle) if visible(middle) else (middle, seen)
    return row - hidden
