"""What a model's attention looks like, and which state its layers would keep between tokens."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import Cache

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.faults import models_own
from oomb.model.interface import UNKNOWN, AttentionCall, probed_masks, window_of_mask
from oomb.model.latent import latent_width
from oomb.model.layer_shape import LayerShape, kernel_head_dim
from oomb.model.mixers import Mixer, StateName, cache_argument
from oomb.model.own_mixing import why_no_call


def attention_shapes(model: CausalModel, own_calls: Collection[int]) -> list[LayerShape]:
    """Shapes of the attention of each layer that has it, from one forward of two tokens.

    The model then knows its mixers, and which of its layers have pages.

    Args:
        own_calls: layers whose attention the model's own forward takes from transformers.

    Raises:
        UnsupportedModelError: a layer keeps a state that a mixer does not give back, calls
            attention more than once, sees its past in a shape that is neither causal, nor a sliding
            window, nor blocks, or has heads that no kernel takes.
    """
    cache: _AskedCache | None = _AskedCache(model)
    try:
        shapes = _shapes(model, cache)
    except UnsupportedModelError as error:
        if isinstance(error, _Asked):
            raise
        _expect_calls(model, own_calls, own_calls)
        cache = None
        try:
            shapes = _shapes(model, None)  # this model knows no cache like ours
        except UnsupportedModelError:
            if isinstance(error, _AskedOfLayer):
                raise error from None  # the sooner of two reasons, and nearer to its cause
            raise
    if not shapes and cache is not None and cache.mixers:
        mixer = next(iter(cache.mixers.values()))
        raise UnsupportedModelError(
            f"{mixer.name}: hands on states, but no layer calls attention: the engine trains "
            "models with at least one layer of keys and values"
        )
    _expect_calls(model, own_calls, shapes)
    layers = sorted(shapes)
    for layer in layers:
        shape, name = shapes[layer], model.layer_names[layer]
        largest = 256 if model.device.type == "cuda" and model.dtype == torch.float64 else 512
        if shape.head_dim > largest:
            raise UnsupportedModelError(
                f"{name}: expected a head dim of at most {largest}, got {shape.head_dim}"
            )
        # A layer that reads another's pages reads keys and values; a half of a latent is a head.
        read = any(other.source == layer for other in shapes.values())
        if shape.latent and (read or shape.stored_dim > largest):
            shapes[layer] = replace(shape, latent=0)
    model.paged = {layer: number for number, layer in enumerate(layers)}
    if cache is not None:
        model.mixers = list(cache.mixers.values())
        model.ends_in_mixer = cache.ends_in_mixer
    return [
        shape if shape.source is None else replace(shape, source=model.paged[shape.source])
        for shape in (shapes[layer] for layer in layers)
    ]


def _shapes(model: CausalModel, cache: _AskedCache | None) -> dict[int, LayerShape]:
    shapes: dict[int, LayerShape] = {}
    stored: dict[int, AttentionCall] = {}
    takes_masks = model.causal.config._attn_implementation in ("eager", "sdpa")

    def record(call: AttentionCall) -> torch.Tensor:
        layer = model.layer_of(call.module)
        where = model.layer_names[layer]
        if layer in shapes:
            raise UnsupportedModelError(f"{where}: calls attention more than once")
        window, block = call.window, 0
        if call.mask is not None:
            window = int(call.mask)
            _expect_window(takes_masks, where, window, call.window)
            if window < 0:
                # A block's rows see no more than a window of its size, and less by first keys.
                window = model.mask_blocks[layer] = block = -window
            if window != call.window:
                model.mask_windows[layer] = window
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        head_dim = kernel_head_dim(call, model.capability)
        source = _source(call, stored)
        if source is None:
            stored[layer] = call
        latent = latent_width(call.latent, call.k, call.v, has_values=True)
        shapes[layer] = LayerShape(
            heads, kv_heads, head_dim, window, source, block=block, latent=latent
        )
        if cache is not None:
            cache.ends_in_mixer = False
        batch, heads, tokens = call.q.shape[:3]
        return call.q.new_zeros(batch, tokens, heads, call.v.shape[3]).transpose(1, 2)

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    session = model.session(
        record, largest_position=1, rope_angles="model", places=lambda: positions
    )
    own = models_own(model.decoder, "fails where attention is the engine's")
    name = _decoder_cache_argument(model)
    with torch.no_grad(), probed_masks(window_of_mask), session, own:
        model.decoder(input_ids=ids, position_ids=positions, use_cache=False, **{name: cache})
    return shapes


def _decoder_cache_argument(model: CausalModel) -> str:
    return cache_argument(inspect.signature(type(model.decoder).forward)) or "past_key_values"


def _source(call: AttentionCall, stored: dict[int, AttentionCall]) -> int | None:
    """The layer whose keys and values a call reads: they are the same tensors."""
    same = (layer for layer, of in stored.items() if call.k is of.k and call.v is of.v)
    return next(same, None)


def _expect_window(takes_masks: bool, where: str, of_mask: int, of_call: int) -> None:
    """A mask's window holds also where the attention function is not told of it, if it takes masks.

    Raises:
        UnsupportedModelError: the two disagree, or the mask is no window.
    """
    if of_mask == of_call:
        return
    if of_mask not in (0, UNKNOWN) and of_call == 0:
        if takes_masks:
            return
        if of_mask < 0:
            raise UnsupportedModelError(
                f"{where}: its mask shows it blocks of {-of_mask} tokens, of which its attention "
                "function is not told: load the model with attn_implementation='sdpa' or 'eager', "
                "which take that mask"
            )
        raise UnsupportedModelError(
            f"{where}: its mask is a sliding window of {of_mask} tokens, of which it does not tell "
            "its attention function (no sliding_window): other attention functions than the one "
            "with that mask would see everything; set sliding_window to None in its config if it "
            "is meant to"
        )
    if of_mask < 0:
        raise UnsupportedModelError(
            f"{where}: its mask is neither causal, nor a sliding window, nor blocks of tokens (it "
            "sees tokens both ways, or by a rule of its own)"
        )
    raise UnsupportedModelError(
        f"{where}: its mask and its attention function disagree about the window: "
        f"{of_mask or 'none'} and {of_call} tokens"
    )


def _expect_calls(model: CausalModel, own: Collection[int], ours: Collection[int]) -> None:
    """Some layer calls attention; what the engine gets is what the model's own forward calls.

    A layer that never calls it has none, or one of its own: a later check tells.
    """
    for layer in range(len(model.layers)):
        if (layer in own) != (layer in ours) or not ours:
            raise UnsupportedModelError(why_no_call(model, layer))


class _Asked(UnsupportedModelError):
    """A layer asks for a state that the engine does not carry from chunk to chunk."""


class _AskedOfLayer(UnsupportedModelError):
    """A layer asks its own part of a cache, and perhaps runs as well without one."""


class _OwnLayers(list[Any]):
    """The parts of a cache that layers of a model have classes of their own for: none, and whoever
    takes one all the same gets a stand-in."""

    def __init__(self, cache: _AskedCache) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # which has these, and the model

    def __getitem__(self, place: Any) -> Any:
        cache = self._cache()
        return [] if isinstance(place, slice) or cache is None else _OwnLayer(cache)


class _OwnLayer:
    """Knows nothing of what a decoder may ask for; says who asks inside of a layer."""

    def __init__(self, cache: _AskedCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        asker = self._cache._asker()
        if asker is not None:
            raise _AskedOfLayer(
                f"{asker}: asks its cache for a state of its own kind ({name}), which chunks do "
                "not carry"
            )


class _AskedCache(Cache):
    """Gives keys and values back as they come, and names who asks for anything else.

    Attributes:
        mixers: by module id, in the order in which they left a state.
        ends_in_mixer: whether the last to be heard of was one of them.
    """

    def __init__(self, model: CausalModel) -> None:
        super().__init__(layers=_OwnLayers(self))
        self._model = model
        self.mixers: dict[int, Mixer] = {}
        self.ends_in_mixer = False

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        asker = self._asker()
        if asker is not None:
            self._refuse(asker, "how long the sequence before it is")
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        asker = self._asker()
        if asker is not None:
            self._refuse(
                asker,
                "the state of a recurrence or convolution, in the way of transformers before 5.21",
            )
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        self._expect_asker("the state of a convolution")

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        size = conv_kernel_size or conv_states.shape[-1]
        self._leaves(
            ("conv", state_idx), conv_states[..., :1].expand(*conv_states.shape[:-1], size)
        )
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._leaves(("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return True

    def _leaves(self, name: StateName, state: torch.Tensor) -> None:
        """A mixer hands on a state [1, …]."""
        module, layer, where = self._expect_asker("the state of a recurrence or convolution")
        if cache_argument(inspect.signature(type(module).forward)) is None:
            self._refuse(where, "a state; it takes its cache by a name of its own")
        # Its decay has a row a channel; that of recurrences which can be carried a number a head.
        decay = getattr(module, "A_log", None)
        if isinstance(decay, torch.Tensor) and sum(size > 1 for size in decay.shape) > 1:
            self._refuse(where, "the state of Mamba-1, from which no stretch of tokens can begin")
        mixer = self.mixers.pop(id(module), Mixer(module, layer, where, {}))
        if layer != mixer.layer:
            self._refuse(where, "states in several layers that share it")
        shapes = {**mixer.shapes, name: (state.shape[1:], state.dtype)}
        self.mixers[id(module)] = replace(mixer, shapes=shapes)
        self.ends_in_mixer = True

    def get_linear_cache(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(
            self._asker(),
            "the state of lightning attention, from which its code goes on token by token alone",
        )

    def update_indexer(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(self._asker(), "the keys of an indexer that chooses what attention sees")

    def _asker(self) -> str | None:
        """Name of the innermost module of a decoder layer that is running."""
        asker = self._asking()
        return None if asker is None else asker[2]

    def _expect_asker(self, what: str) -> tuple[nn.Module, int, str]:
        asker = self._asking()
        if asker is None:
            self._refuse(None, what)
        return asker

    def _asking(self) -> tuple[nn.Module, int, str] | None:
        """The innermost module of a decoder layer that is running, its layer and name."""
        inside = {
            id(part): (
                part,
                index,
                f"{where.split(' ')[0]}{'.' * bool(name)}{name} ({type(part).__name__})",
            )
            for index, where in enumerate(self._model.layer_names)
            for name, part in self._model.layers[index].named_modules()
        }
        frame = sys._getframe(1)
        while frame is not None:
            running = frame.f_locals.get("self")
            if isinstance(running, nn.Module) and id(running) in inside:
                return inside[id(running)]
            if frame.f_back is None:
                return None
            frame = frame.f_back
        return None

    def _refuse(self, asker: str | None, what: str) -> NoReturn:
        where = asker or type(self._model.decoder).__name__
        raise _Asked(f"{where}: asks its cache for {what}, which chunks do not carry")


def found_mixers(model: CausalModel) -> list[Mixer]:
    """What hands on states, from one forward on tensors that need no values."""
    cache = _AskedCache(model)

    def nothing(call: AttentionCall) -> torch.Tensor:
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    session = model.session(nothing, largest_position=1, rope_angles="model", places=lambda: ids)
    name = _decoder_cache_argument(model)
    with torch.no_grad(), session:
        model.decoder(input_ids=ids, position_ids=ids, use_cache=False, **{name: cache})
    return list(cache.mixers.values())


def key_dtype(model: CausalModel) -> torch.dtype:
    """Dtype that keys have under the caller's autocast state: that of the pages."""
    seen: list[torch.dtype] = []

    class Seen(Exception):
        pass

    def record(call: AttentionCall) -> torch.Tensor:
        seen.append(call.k.dtype)
        raise Seen

    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    torch.clear_autocast_cache()
    session = model.session(record, largest_position=0, rope_angles="model")
    with (
        suppress(Seen),
        torch.no_grad(),
        torch.random.fork_rng(devices=model.rng_devices()),
        session,
    ):
        model.hidden(ids, ids)
    return seen[0]
