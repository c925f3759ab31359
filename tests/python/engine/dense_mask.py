"""Attention in plain torch under any dense mask, as a transformers attention implementation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from oomb.results import Selection

NAME = "dense_mask"


@dataclass
class Visible:
    """What queries may see in an ordinary forward of [batch, tokens]."""

    batch: int
    tokens: int
    chunk_size: int
    page_size: int
    selection: Selection  # [layer][chunk], as in step.selection
    lengths: torch.Tensor | None = None  # [batch] tokens before padding
    document_start: torch.Tensor | None = None  # [batch, tokens] first key of each row's document
    window: int | None = None  # chunks that gradient reaches back; None: all
    # q and k of each layer, kept for the tests that look at them.
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def base(self) -> torch.Tensor:
        """[batch, 1, tokens, tokens]: causal, inside the document, no padding."""
        index = torch.arange(self.tokens)
        mask = (index[None] <= index[:, None]).expand(self.batch, 1, -1, -1).clone()
        if self.lengths is not None:
            mask &= (index[None] < self.lengths[:, None])[:, None, None]
        if self.document_start is not None:
            mask &= (index >= self.document_start[..., None])[:, None]
        return mask

    def constant(self) -> torch.Tensor:
        """[tokens, tokens]: keys and values that gradient of a row does not reach."""
        chunk = torch.arange(self.tokens) // self.chunk_size
        return chunk[:, None] - chunk[None] > (self.tokens if self.window is None else self.window)

    def of_layer(self, layer: int, kv_heads: int, window: int) -> torch.Tensor:
        """[batch, kv_heads, tokens, tokens]: with the layer's window and selected pages."""
        mask = self.base().expand(-1, kv_heads, -1, -1).clone()
        index = torch.arange(self.tokens)
        if window:
            mask &= index[None] > index[:, None] - window
        for chunk, lists in enumerate(self.selection[layer] if self.selection else []):
            if lists is None:
                continue
            begin = chunk * self.chunk_size
            for sequence, block, head in torch.cartesian_prod(
                *(torch.arange(n) for n in (self.batch, lists.shape[1], kv_heads))
            ).tolist():
                row = lists[sequence, block, head if lists.shape[2] > 1 else 0]
                listed = torch.isin(index // self.page_size, row[row >= 0]) | (index >= begin)
                rows = slice(
                    begin + block * self.page_size,
                    min(begin + (block + 1) * self.page_size, begin + self.chunk_size),
                )
                mask[sequence, head, rows] &= listed
        return mask


_visible: Visible | None = None


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert _visible is not None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _visible.seen[layer] = query.detach(), key.detach()
    group = query.shape[1] // key.shape[1]
    mask = _visible.of_layer(layer, key.shape[1], sliding_window or 0)
    key, value, mask = (x.repeat_interleave(group, dim=1) for x in (key, value, mask))
    far = _visible.constant()
    products = query @ key.transpose(-1, -2)
    products = torch.where(far, query @ key.detach().transpose(-1, -2), products)
    scores = products * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        blind = ~mask.any(dim=-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    near, constant = weights.masked_fill(far, 0.0), weights.masked_fill(~far, 0.0)
    return (near @ value + constant @ value.detach()).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


@contextmanager
def dense_attention(model: PreTrainedModel, visible: Visible) -> Iterator[None]:
    """The model's attention sees exactly what ``visible`` says."""
    global _visible
    before = model.config._attn_implementation
    _visible = visible
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        _visible = None
        model.set_attn_implementation(before)
