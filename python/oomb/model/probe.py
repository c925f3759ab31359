"""What a model's attention looks like, and which state its layers would keep between tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import Cache

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel, LayerShape
from oomb.model.faults import models_own
from oomb.model.interface import AttentionCall, recorded_masks

_LARGEST_HEAD_DIM = 256  # of the kernels


def attention_shapes(model: CausalModel, own_calls: Collection[int]) -> list[LayerShape]:
    """Shapes of every layer's attention, from one forward of two tokens.

    Args:
        own_calls: layers whose attention the model's own forward takes from transformers.

    Raises:
        UnsupportedModelError: a layer keeps another state than keys and values, does not call
            attention exactly once, sees its past in a shape that is neither causal nor a sliding
            window, or differs from the others in its pages.
    """
    cache = _AskedCache(model)
    try:
        shapes = _shapes(model, cache)
    except UnsupportedModelError as error:
        if isinstance(error, _Asked):
            raise
        _expect_calls(model, own_calls)
        shapes = _shapes(model, None)  # this model knows no cache like ours
    _expect_calls(model, own_calls)
    _expect_calls(model, shapes)
    for layer, name in enumerate(model.layer_names):
        shape = shapes[layer]
        if _page_of(shape) != _page_of(shapes[0]):
            raise UnsupportedModelError(
                f"{name}: its keys and values differ in shape from layer 0's: expected "
                f"{_words(shapes[0])}, got {_words(shape)}"
            )
        if shape.head_dim > _LARGEST_HEAD_DIM:
            raise UnsupportedModelError(
                f"{name}: expected a head dim of at most {_LARGEST_HEAD_DIM}, got {shape.head_dim}"
            )
    return [shapes[layer] for layer in range(len(model.layers))]


def _shapes(model: CausalModel, cache: Cache | None) -> dict[int, LayerShape]:
    shapes: dict[int, LayerShape] = {}

    def record(call: AttentionCall) -> torch.Tensor:
        layer = model.layer_of(call.module)
        where = model.layer_names[layer]
        if layer in shapes:
            raise UnsupportedModelError(f"{where}: calls attention more than once")
        if call.mask is not None:
            _expect_window(where, int(call.mask), call.window)
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        shapes[layer] = LayerShape(heads, kv_heads, call.q.shape[3], call.window)
        return torch.zeros_like(call.q)

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    session = model.session(record, largest_position=1, rope_angles="model")
    own = models_own(model.decoder, "fails where attention is the engine's")
    taken = inspect.signature(type(model.decoder).forward).parameters
    name = "cache_params" if "cache_params" in taken else "past_key_values"
    with torch.no_grad(), recorded_masks(), session, own:
        model.decoder(input_ids=ids, position_ids=positions, use_cache=False, **{name: cache})
    return shapes


def _expect_window(where: str, of_mask: int, of_call: int) -> None:
    if of_mask == of_call:
        return
    if of_mask > 0 and of_call == 0:
        raise UnsupportedModelError(
            f"{where}: its mask is a sliding window of {of_mask} tokens, of which it does not tell "
            "its attention function (no sliding_window): other attention functions than the one "
            "with that mask would see everything; set sliding_window to None in its config if it "
            "is meant to"
        )
    if of_mask < 0:
        raise UnsupportedModelError(
            f"{where}: its mask is neither causal nor a sliding window (it sees tokens in blocks, "
            "both ways, or by a rule of its own)"
        )
    raise UnsupportedModelError(
        f"{where}: its mask and its attention function disagree about the window: "
        f"{of_mask or 'none'} and {of_call} tokens"
    )


def _expect_calls(model: CausalModel, seen: Collection[int]) -> None:
    for layer, name in enumerate(model.layer_names):
        if layer not in seen:
            raise UnsupportedModelError(
                f"{name}: does not call attention through transformers' interface: it has none "
                "(a recurrence, a convolution, experts alone) or brings one of its own"
            )


def _page_of(shape: LayerShape) -> tuple[int, int]:
    return shape.kv_heads, shape.head_dim


def _words(shape: LayerShape) -> str:
    return f"{shape.kv_heads} heads of {shape.head_dim}"


class _Asked(UnsupportedModelError):
    """A layer asks for a state that the engine does not carry from chunk to chunk."""


class _AskedCache(Cache):
    """Gives keys and values back as they come, and names who asks for anything else."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(layers=[])
        self._model = model

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
            self._refuse(asker, "the state of a recurrence or convolution")
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(self._asker(), "the state of a convolution")

    update_conv_state = get_conv_state

    def get_recurrent_state(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(self._asker(), "the state of a recurrence")

    update_recurrent_state = get_recurrent_state

    def update_indexer(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(self._asker(), "the keys of an indexer that chooses what attention sees")

    def _asker(self) -> str | None:
        """Name of the innermost module of a decoder layer that is running."""
        inside = {
            id(part): f"{where.split(' ')[0]}{'.' * bool(name)}{name} ({type(part).__name__})"
            for layer, where in zip(self._model.layers, self._model.layer_names, strict=True)
            for name, part in layer.named_modules()
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
