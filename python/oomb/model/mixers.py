"""Modules that keep a state of constant size between tokens, run on a stretch of a sequence.

Recurrences (gated delta nets, Mamba-2) and short convolutions ask transformers' cache for the state
of the tokens before theirs, and give it the state behind them. A mixer is such a module. Here it is
given a cache that assigns states instead of copying them, so autograd sees both of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import Cache

StateName = tuple[str, int]  # "conv" or "recurrent", and which of several
States = dict[StateName, torch.Tensor]

# Runs a mixer: (index of the mixer, its own forward, args, keywords) -> output.
MixerRunner = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Mixer:
    """A module of a decoder layer that hands states from token to token.

    Attributes:
        module: whose forward takes hidden states [B, T, hidden_size] first, and a cache.
        layer: of the decoder.
        name: for messages.
        shapes: of each state, for one sequence, with its dtype.
    """

    module: nn.Module
    layer: int
    name: str
    shapes: dict[StateName, tuple[torch.Size, torch.dtype]]

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward)

    @property
    def state_bytes(self) -> int:
        """All states of one sequence."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.shapes.values())

    def given(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
        """The hidden states among its arguments."""
        hidden: torch.Tensor = self._bound(args, keywords).arguments[self._first]
        return hidden

    def giving(
        self, hidden: torch.Tensor, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments with other hidden states."""
        bound = self._bound(args, keywords)
        bound.arguments[self._first] = hidden
        return bound.args[1:], bound.kwargs

    def trains(self, hidden: torch.Tensor) -> bool:
        """Whether gradient flows into it: its states then need one as well."""
        if not torch.is_grad_enabled():
            return False
        return hidden.requires_grad or any(p.requires_grad for p in self.module.parameters())

    def stretch(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        hidden: torch.Tensor,
        before: States | None,
    ) -> tuple[Any, States]:
        """Its output for ``hidden`` [B, T, hidden_size], and the states behind the last token.

        Args:
            before: states that the tokens before have left; None: there are none.

        One token behind others would take the kernels of generation, which change states in place
        and have no backward. It is given twice, and what the second yields is left out; the states
        are then of no use, and no later token may need them.
        """
        single = before is not None and hidden.shape[1] == 1
        cache = StateCache(before)
        bound = self._bound(args, keywords)
        bound.arguments[self._first] = hidden.repeat(1, 2, 1) if single else hidden
        bound.arguments[self._cache_argument] = cache
        output = forward(*bound.args[1:], **bound.kwargs)
        return (of_tokens(output, 0, 1) if single else output), cache.left

    def _bound(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> inspect.BoundArguments:
        return self._signature.bind(self.module, *args, **keywords)

    @cached_property
    def _first(self) -> str:
        return list(self._signature.parameters)[1]

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self._signature) or "past_key_values"


def cache_argument(signature: inspect.Signature) -> str | None:
    """The name under which a forward takes its cache; None: it takes none.

    transformers 5.24 calls it ``cache`` everywhere; code written before has two names for it.
    """
    names = ("cache", "cache_params", "past_key_values")
    return next((name for name in names if name in signature.parameters), None)


class StateCache(Cache):
    """States before a stretch of tokens, and those behind it; keys and values come back as given.

    Attributes:
        left: states behind the last token.
    """

    def __init__(self, before: States | None) -> None:
        super().__init__(layers=[])
        self._before = before or {}
        self.left: States = {}

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._before.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Inputs of a convolution [B, channels, T]; returned behind the last of those before."""
        before = self._before.get(("conv", state_idx))
        size = conv_kernel_size or conv_states.shape[-1]
        joined = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        padded = nn.functional.pad(joined, (max(0, size - joined.shape[-1]), 0))
        # A view would keep the inputs of all tokens.
        self.left["conv", state_idx] = padded[..., -size:].contiguous()
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.left["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self._before)

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return True  # else one token would take the kernels of generation

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def of_tokens(output: Any, begin: int, end: int) -> Any:
    """An output, tensors or tuples of them, for tokens [begin, end)."""
    return _each(output, lambda x: x[:, begin:end])


def joined(parts: Sequence[Any], dim: int) -> Any:
    """Outputs of stretches, tensors or tuples of them, as one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts), dim=dim)
    return type(parts[0])(joined(part, dim) for part in zip(*parts, strict=True))


def joined_states(parts: Sequence[States]) -> States:
    """States of groups of sequences, as those of all of them."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def of_rows(states: States, rows: slice) -> States:
    """The states of some sequences."""
    return {name: state[rows] for name, state in states.items()}


def state_bytes(mixers: Iterable[Mixer]) -> int:
    """What all mixers hand over a border, for one sequence."""
    return sum(mixer.state_bytes for mixer in mixers)


def _each(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output)
    return type(output)(_each(part, change) for part in output)
