"""Layer outputs, queries and keys of an evaluation, recorded at a sample of query blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from oomb.audit.gradients import likeness
from oomb.audit.results import Likeness
from oomb.core.attention import ChunkAttention
from oomb.model.causal import CausalModel
from oomb.model.interface import AttentionCall, observed_attention


@dataclass
class LayerAttention:
    """One layer's attention in host memory: q at the sampled rows, k of every token.

    Attributes:
        queries: [B, Hq, rows, D].
        keys: [B, Hkv, tokens, D].
    """

    scale: float
    softcap: float  # 0: none
    queries: torch.Tensor
    keys: torch.Tensor


@dataclass
class _Pieces:
    """Of one layer, chunk by chunk."""

    tokens: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    seen_keys: int = 0
    scale: float = 1.0
    softcap: float = 0.0


class Recorder:
    """What the layers of a model see and give while an engine evaluates.

    Args:
        rows: [tokens] bool, True at the sampled ones.
        attention: also record queries and keys, of layers without a sliding window.
    """

    def __init__(self, model: CausalModel, rows: torch.Tensor, attention: bool) -> None:
        self._model = model
        self._rows = rows
        self._attention = attention
        self._layers = [_Pieces() for _ in model.layers]

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, layer in enumerate(self._model.layers):
                handle = layer.register_forward_hook(self._hook(index))
                stack.callback(handle.remove)
            if self._attention:
                stack.enter_context(observed_attention(self._observe))
            yield

    @property
    def tokens(self) -> int:
        """That were run."""
        return self._layers[0].tokens

    def outputs(self, layer: int) -> torch.Tensor:
        """[…, B, rows, hidden_size]; layers of Gemma 3n hand on several streams of them."""
        return torch.cat(self._layers[layer].outputs, dim=-2)

    def attention(self, layer: int) -> LayerAttention | None:
        """None for a layer with a sliding window."""
        pieces = self._layers[layer]
        if not pieces.keys:
            return None
        queries, keys = torch.cat(pieces.queries, dim=2), torch.cat(pieces.keys, dim=2)
        return LayerAttention(pieces.scale, pieces.softcap, queries, keys)

    def _hook(self, index: int) -> Any:
        def keep(_: Any, __: Any, output: Any) -> None:
            # Before the chunks of a call the engine looks at the dtype of keys in a forward of one
            # token, which layers below the first attention run to their end.
            if not ChunkAttention.active:
                return
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            pieces, tokens = self._layers[index], hidden.shape[-2]
            rows = self._of_chunk(pieces.tokens, tokens).to(hidden.device)
            pieces.outputs.append(hidden[..., rows, :].to("cpu", copy=True))
            pieces.tokens += tokens

        return keep

    def _observe(self, call: AttentionCall) -> None:
        if self._model.window_of(call):
            return
        pieces = self._layers[self._model.layer_of(call.module)]
        rows = self._of_chunk(pieces.seen_keys, call.q.shape[2]).to(call.q.device)
        pieces.queries.append(call.q[:, :, rows].to("cpu", copy=True))
        pieces.keys.append(call.k.to("cpu", copy=True))
        pieces.seen_keys += call.q.shape[2]
        pieces.scale, pieces.softcap = call.scale, call.softcap

    def _of_chunk(self, begin: int, tokens: int) -> torch.Tensor:
        return self._rows[begin : begin + tokens]


def compare_outputs(found: torch.Tensor, exact: torch.Tensor) -> Likeness:
    """Of two tensors, summed in fp64."""
    a, b = found.double().flatten(), exact.double().flatten()
    sums = (torch.dot(a, b), torch.dot(a, a), torch.dot(b, b), torch.dot(a - b, a - b))
    return likeness(*(float(value) for value in sums))
