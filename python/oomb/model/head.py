"""Logits of hidden states through a model's own head, with whatever the model does to them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import MoeModelOutputWithPast

from oomb.model.swap import Swaps

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

    Attributes:
        gives_logits: of tokens; else it classifies sequences by their last token.
    """

    def __init__(self, causal: nn.Module, decoder: nn.Module) -> None:
        self._causal = causal
        self._decoder = decoder
        self.gives_logits = not is_classifier(causal)
        self._hidden: torch.Tensor | None = None
        self._tried: tuple[object, nn.Parameter, bool] | None = None

    @cached_property
    def _arguments(self) -> Collection[str]:
        """Names of what the causal model's own forward takes."""
        return inspect.signature(type(self._causal).forward).parameters.keys()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's weights."""
        dtype: torch.dtype = next(self._causal.parameters()).dtype
        return dtype

    def own_weights(self) -> list[nn.Parameter]:
        """Those of the causal model that are not its decoder's."""
        inside = set(self._decoder.parameters())
        return [p for p in self._causal.parameters() if p not in inside]

    def dropouts(self) -> list[nn.Module]:
        """Modules outside the decoder that draw (an adapter's, on the head)."""
        inside = set(self._decoder.modules())
        found = [m for m in self._causal.modules() if isinstance(m, nn.Dropout)]
        return [m for m in found if m not in inside and m.training and m.p > 0]

    def plain_weight(self) -> nn.Parameter | None:
        """Weight of a head whose logits are ``hidden @ weight.T`` and nothing more; else None.

        A ``forward`` that somebody put on the causal model itself (TRL's trainers do) is tried on a
        few rows. Outside :meth:`attached`, where nothing is replaced.
        """
        causal: Any = self._causal
        linear = causal.get_output_embeddings()
        known = type(causal).__name__ in _PLAIN
        known = known and type(causal).__module__.startswith("transformers.")
        if not known or type(linear) is not nn.Linear or linear.bias is not None:
            return None
        if _is_watched(causal) or _is_watched(linear) or "forward" in vars(linear):
            return None
        if type(linear.weight) is not nn.Parameter:
            return None
        forward = vars(causal).get("forward")
        if forward is not None and not self._is_product(forward, linear.weight):
            return None
        weight: nn.Parameter = linear.weight
        return weight

    def _is_product(self, forward: object, weight: nn.Parameter) -> bool:
        """Whether a replaced forward gives the bits that the product does, for small and large
        logits; asked once for each."""
        if self._tried is None or self._tried[0] is not forward or self._tried[1] is not weight:
            self._tried = forward, weight, weight.device.type != "meta" and self._agrees(weight)
        return self._tried[2]

    @torch.no_grad()
    def _agrees(self, weight: nn.Parameter) -> bool:
        own = torch.Generator().manual_seed(0)
        rows = torch.randn(4, weight.shape[1], generator=own) * torch.tensor([[1], [1], [64], [64]])
        rows = rows.to(weight.device, weight.dtype)
        with self.attached():
            logits = self.logits(rows)
        return torch.equal(logits, F.linear(rows[None], weight)[0].to(logits.dtype))

    def attached(self) -> Swaps:
        """While active, calls of the causal model see the hidden states given to ``logits``."""
        return Swaps(self._attach)

    def _attach(self, swaps: Swaps) -> None:
        decoder_forward = self._decoder.forward

        def forward(*args: Any, **keywords: Any) -> Any:
            if self._hidden is None:
                return decoder_forward(*args, **keywords)
            return _DecoderOutput(last_hidden_state=self._hidden)

        swaps.keep_item(vars(self), "_hidden")
        swaps.replace(self._decoder, "forward", forward)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] logits of hidden states [rows, hidden_size]."""
        self._hidden = hidden[None]
        given: dict[str, Any] = {"inputs_embeds": self._hidden}
        if "per_layer_inputs" in self._arguments:  # else it would look for ids of these embeddings
            given["per_layer_inputs"] = self._hidden
        try:
            output = self._causal(**given, use_cache=False)
        finally:
            self._hidden = None
        logits: torch.Tensor = output.logits
        return logits[0]

    def of_sequences(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """[batch, labels] of a head that classifies sequences.

        Args:
            hidden: [batch, tokens, hidden_size], on any device.
            input_ids: [batch, tokens]. The last token that is not the model's padding token
                stands for its sequence, as in transformers.
        """
        causal: Any = self._causal
        padding = causal.config.get_text_config().pad_token_id
        last = torch.full_like(input_ids[:, 0], input_ids.shape[1] - 1)
        if padding is not None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            last = (places * (input_ids != padding)).argmax(1)
        rows = torch.arange(len(last), device=hidden.device), last.to(hidden.device)
        self._hidden = hidden[rows][:, None].to(input_ids.device)
        try:
            output = causal(input_ids=input_ids[:, :1], use_cache=False)
        finally:
            self._hidden = None
        logits: torch.Tensor = output.logits
        return logits


def is_classifier(causal: nn.Module) -> bool:
    """Whether a model's head classifies sequences."""
    return type(causal).__name__.endswith("ForSequenceClassification")


def _is_watched(module: Any) -> bool:
    """Somebody looks at what passes through a module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)
