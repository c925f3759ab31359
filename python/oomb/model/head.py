"""Logits of hidden states through a model's own head, with whatever the model does to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

# Causal models whose forward multiplies the decoder's output by its head's weight and ends there.
_PLAIN = frozenset(
    [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ]
)


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """What heads of any kind look for in their decoder's output."""

    cross_attentions: None = None
    shared_kv_states: None = None


class Head:
    """Runs the causal model's forward with its decoder standing still.

    So scaling, caps and biases of logits are the model's own code. Use inside :meth:`attached`.
    """

    def __init__(self, causal: nn.Module, decoder: nn.Module) -> None:
        self._causal = causal
        self._decoder = decoder
        self._hidden: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's weights."""
        dtype: torch.dtype = next(self._causal.parameters()).dtype
        return dtype

    def plain_weight(self) -> nn.Parameter | None:
        """Weight of a head whose logits are ``hidden @ weight.T`` and nothing more; else None.

        Outside :meth:`attached`, where nothing is replaced.
        """
        causal: Any = self._causal
        linear = causal.get_output_embeddings()
        known = type(causal).__name__ in _PLAIN
        known = known and type(causal).__module__.startswith("transformers.")
        if not known or type(linear) is not nn.Linear or linear.bias is not None:
            return None
        if _is_touched(causal) or _is_touched(linear) or type(linear.weight) is not nn.Parameter:
            return None
        return linear.weight

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While active, calls of the causal model see the hidden states given to ``logits``."""
        decoder_forward = self._decoder.forward
        own = self._decoder.__dict__.get("forward")

        def forward(*args: Any, **keywords: Any) -> Any:
            if self._hidden is None:
                return decoder_forward(*args, **keywords)
            return _DecoderOutput(last_hidden_state=self._hidden)

        self._decoder.forward = forward
        try:
            yield
        finally:
            self._decoder.__dict__.pop("forward", None)
            if own is not None:
                self._decoder.forward = own

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] logits of hidden states [rows, hidden_size]."""
        self._hidden = hidden[None]
        try:
            output = self._causal(inputs_embeds=self._hidden, use_cache=False)
        finally:
            self._hidden = None
        logits: torch.Tensor = output.logits
        return logits[0]


def _is_touched(module: Any) -> bool:
    """Somebody has replaced a module's forward or looks at what passes through it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in module.__dict__ or any(getattr(module, name) for name in hooks)
