"""The latent that a layer expands its keys and values from, where its module shows how.

Latent attention (DeepSeek's) makes the keys and values of all heads from one short vector of a
token, and from one rotated key that the heads share:

    latent [B, 1, T, rank]    ┐
                              ├── module.expand_kv ──▶ k [B, H, T, nope + rope], v [B, H, T, …]
    rotated [B, 1, T, rope]   ┘

For the length of a call that method is watched. It is run again on tokens of the past.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from oomb.model.linear import DividedForward, runs_as_is
from oomb.model.swap import Swaps, swapping

# Relative to the largest value: what other rows beside a token's may change of it.
_ROUNDED = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_ROUNDED_OTHERWISE = 1e-4


@dataclass(frozen=True)
class Expansion:
    """How a module expands latents, under the autocast state in which it did.

    Attributes:
        module: whose own method ``expand`` is.
        rank, rope: numbers of the latent and of the rotated key.
        heads: first and last + 1 of those that are made, and how many there are; None: all.
    """

    module: nn.Module
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rank: int
    rope: int
    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    heads: tuple[int, int, int] | None = None

    def of_heads(self, first: int, last: int, number: int) -> Expansion:
        """The same for heads [first, last) of ``number``."""
        return replace(self, heads=(first, last, number))

    def __call__(
        self, latent: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v [B, H, T, …] of latents [B, 1, T, rank] and rotated keys [B, 1, T, rope]."""
        # A weight that is cast here must not serve another graph, or one without autograd.
        with torch.autocast(
            self.device_type,
            dtype=self.autocast_dtype,
            enabled=self.autocast,
            cache_enabled=False,
        ):
            if self.heads is None:
                return self.expand(latent, rotated)
            first, last, number = self.heads
            divided = self._divided(number)
            if divided is None:  # adapters, quantised weights: all heads are made
                k, v = self.expand(latent, rotated)
                return k[:, first:last], v[:, first:last]
            forward, size = divided
            with forward.only((first * size, last * size)):
                return self.expand(latent, rotated)

    def _divided(self, number: int) -> tuple[DividedForward, int] | None:
        """Of the linear layer that alone makes heads: its forward, and its outputs of one head."""
        forwards = [vars(part).get("forward") for part in _parts(self)]
        if len(forwards) != 1 or not isinstance(forwards[0], DividedForward):
            return None
        size, rest = divmod(forwards[0].outputs, number)
        return None if rest else (forwards[0], size)


@dataclass(frozen=True)
class Latent:
    """What keys and values were expanded from: latent [B, 1, T, rank], rotated [B, 1, T, rope]."""

    expansion: Expansion
    latent: torch.Tensor
    rotated: torch.Tensor

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.expansion.rank + self.expansion.rope

    def vector(self, dtype: torch.dtype) -> torch.Tensor:
        """Both as one vector [B, 1, T, even width], as pages hold it; autograd sees it."""
        joined = torch.cat((self.latent, self.rotated), -1).to(dtype)
        return torch.nn.functional.pad(joined, (0, self.width % 2))


# What each module has expanded last, with the keys and values that came out. As in
# :mod:`oomb.model.interface` plain globals: one call runs at a time.
_made: dict[int, tuple[Latent, torch.Tensor, torch.Tensor]] = {}


@swapping
def watched_expansions(swaps: Swaps, decoder: nn.Module) -> None:
    """While active, :func:`taken` knows what modules have expanded."""
    swaps.afterwards(_made.clear)
    for module in decoder.modules():
        expand = getattr(module, "expand_kv", None)
        if callable(expand):
            swaps.replace(module, "expand_kv", _watching(module, expand))


def _watching(module: nn.Module, expand: Callable[..., Any]) -> Callable[..., Any]:
    def watching(*args: Any, **keywords: Any) -> Any:
        made = expand(*args, **keywords)
        if not keywords and len(args) == 2 and all(map(_is_one_head, args)):
            kind = args[0].device.type
            expansion = Expansion(
                module=module,
                expand=expand,
                rank=args[0].shape[-1],
                rope=args[1].shape[-1],
                device_type=kind,
                autocast=torch.is_autocast_enabled(kind),
                autocast_dtype=torch.get_autocast_dtype(kind),
            )
            _made[id(module)] = (Latent(expansion, *args), *made)
        return made

    return watching


@swapping
def divided_expansions(swaps: Swaps, decoder: nn.Module) -> None:
    """While active, expansions make some heads alone; after all that replaces linear layers."""
    for module in decoder.modules():
        expand = getattr(module, "expand_kv", None)
        if callable(expand):
            for part in filter(runs_as_is, _parts_of(module, expand)):
                assert isinstance(part, nn.Linear)
                swaps.replace(part, "forward", DividedForward(part))


def _is_one_head(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 4 and x.shape[1] == 1


def taken(module: nn.Module, k: torch.Tensor, v: torch.Tensor) -> Latent | None:
    """What these very keys and values were expanded from just now; None: of nothing known."""
    made = _made.pop(id(module), None)
    return made[0] if made is not None and made[1] is k and made[2] is v else None


def latent_width(
    latent: Latent | None, k: torch.Tensor, v: torch.Tensor, *, has_values: bool
) -> int:
    """Numbers of a token from which the past's keys and values can be had again; 0: they cannot.

    Its method must give for tokens in another order what it gave for them in theirs, and for heads
    alone what it gave for all, draw nothing, and take less than keys and values do.

    Args:
        has_values: the tensors have values to compare.
    """
    if latent is None or latent.width >= k.shape[1] * (k.shape[-1] + v.shape[-1]):
        return 0
    if _draws(latent.expansion):
        return 0
    if has_values:
        again = latent.expansion(latent.latent.flip(2), latent.rotated.flip(2))
        if not all(map(_nearly, again, (k.flip(2), v.flip(2)))):
            return 0
        for head in (0, k.shape[1] - 1):
            alone = latent.expansion.of_heads(head, head + 1, k.shape[1])
            made = alone(latent.latent, latent.rotated)
            if not all(map(_nearly, made, (k[:, head, None], v[:, head, None]))):
                return 0
    return latent.width


def _draws(expansion: Expansion) -> bool:
    """Whether dropout, now or in training, may be part of it: none is drawn twice alike."""
    return any(
        isinstance(part, _DropoutNd) and part.p > 0
        for child in _parts(expansion)
        for part in child.modules()
    )


def _parts(expansion: Expansion) -> list[nn.Module]:
    return _parts_of(expansion.module, expansion.expand)


def _parts_of(module: nn.Module, expand: Callable[..., Any]) -> list[nn.Module]:
    """Children that a module's method uses; all of them, if none is named in its code."""
    children = dict(module.named_children())
    code = getattr(inspect.unwrap(expand), "__code__", None)
    used = children.keys() & set(code.co_names if code is not None else ())
    return [child for name, child in children.items() if name in used or not used]


def _nearly(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    error = (ours.double() - theirs.double()).abs().max()
    limit = _ROUNDED.get(theirs.dtype, _ROUNDED_OTHERWISE)
    return bool(error <= limit * theirs.double().abs().max())
