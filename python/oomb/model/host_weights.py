"""Frozen weights of decoder layers in host memory, brought to the device a layer ahead.

Each layer has a place on the device that is its own for as long as the engine lives, shared with
layers that are not needed at the same time. So whatever autograd, or a function of some library,
has kept of a weight is right again whenever its layer is there:

    place 0   layer 0   layer 2   layer 4 …        fill and sweep forwards  0 1 2 3 …
    place 1   layer 1   layer 3   layer 5 …        the sweep's backward     … 3 2 1 0
    place 2   one of the last two layers           a layer's weights come while its neighbour runs

The third place keeps the last two layers and the first one apart, which two chunks that take turns
need at once. Host memory has every layer's weights at all times; nothing is ever written back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from oomb.errors import Error, UnsupportedModelError
from oomb.model.host_memory import host_block
from oomb.model.swap import Swaps, after_all
from oomb.model.weight_only import codes_of, is_of_torchao, is_weight_only, parts_of

_ALIGNMENT = 256  # bytes, of a weight in its block: what kernels expect of torch's own memory
_PIECE = 32 << 20  # bytes of one copy, between which those of pages find their turn
PLACES = 3


def place_of(layer: int, layers: int) -> int:
    """Where a layer's weights come to: neighbours differ, so do the last two and the first."""
    apart = layers - 2 if layers % 2 == 0 else layers - 1
    return 2 if layer == apart and layers > 2 else layer % 2


class Copies:
    """Copies from the host to places on the device; on a CPU, where one is done when it begins."""

    def load(self, place: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy, behind all that compute has been given so far."""
        target.copy_(source)

    def wait(self, place: int) -> None:
        """Let compute go on when the place's last copy is done."""

    def finish(self) -> None:
        """Let compute go on when all copies are done."""


class CopiesBeside(Copies):
    """On a GPU: in a stream of their own, beside compute's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._loaded = [torch.cuda.Event() for _ in range(PLACES)]

    def load(self, place: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to, of in zip(target.split(_PIECE), source.split(_PIECE), strict=True):
                to.copy_(of, non_blocking=True)
            self._loaded[place].record(self._stream)

    def wait(self, place: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._loaded[place])

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@dataclass(frozen=True)
class _Weight:
    parameter: torch.Tensor
    on_host: torch.Tensor
    on_device: torch.Tensor


@dataclass(frozen=True)
class _Layer:
    module: nn.Module
    block: torch.Tensor
    weights: list[_Weight]


class HostWeights:
    """Weights of layers that are in host memory between calls, and on the device when they run.

    Args:
        layers: of a decoder, whose frozen weights are moved to host memory here.
        names: of these layers.
        device: where they run.

    Attributes:
        host_bytes: of the weights.
        device_bytes: of the places they come to.
        loaded_bytes: that were ever copied.
        stopwatch: measures how long compute waits for copies; None: nobody does.
        copies: how they are copied; a test may put others in place.

    Raises:
        UnsupportedModelError: they have no frozen weights that could be moved.
    """

    def __init__(
        self, layers: Sequence[nn.Module], names: Sequence[str], device: torch.device
    ) -> None:
        movable = movable_weights(layers)
        sizes = block_bytes(movable)
        if not any(sizes):
            raise UnsupportedModelError(
                f"{names[0]}: Config(weights='host') keeps frozen weights of decoder layers on the "
                "host, got layers whose weights are all trained; train adapters of peft, freeze "
                "the base (requires_grad_(False)), or set weights='device'"
            )
        self.host_bytes = sum(sizes)
        self.device_bytes = PLACES * max(sizes)
        self.loaded_bytes = 0
        self.stopwatch: Any = None
        self._device = device
        places = torch.empty(PLACES, max(sizes), dtype=torch.uint8, device=device)
        number = len(layers)
        self._places = [place_of(layer, number) for layer in range(number)]
        self._targets = list(places)
        self._layers = [
            _moved(module, weights, size, self._targets[place], device)
            for module, weights, size, place in zip(
                layers, movable, sizes, self._places, strict=True
            )
        ]
        self.copies: Copies = CopiesBeside(device) if device.type == "cuda" else Copies()
        self._active = self._closed = False
        self._there: list[int | None] = [None] * PLACES  # of each place, the layer it has
        self._inside: Counter[int] = Counter()  # forwards of each layer that are running
        self._backward: int | None = None  # the layer whose backward runs

    def close(self) -> None:
        """Give the places back, at the end of a call that runs. The weights stay on the host."""
        self._closed = True
        if not self._active:
            self._layers, self._targets = [], []

    def streaming(self) -> Swaps:
        """While active, every layer finds its weights on the device when it runs."""
        return Swaps(self._begin)

    def _begin(self, swaps: Swaps) -> None:
        if self._active:
            return
        self._expect_in_place()
        self._there, self._backward = [None] * PLACES, None
        self._inside.clear()
        after_all(self._leave_layers)  # others put back what they found, this perhaps
        swaps.afterwards(self._end)
        self._active = True
        for layer in self._layers:
            for weight in layer.weights:
                weight.parameter.data = weight.on_device
        for index, layer in enumerate(self._layers):
            if layer.weights:
                forward = partial(self._run, index, layer.module.forward)
                swaps.replace(layer.module, "forward", forward)

    def _end(self) -> None:
        for layer in self._layers:
            for weight in layer.weights:
                weight.parameter.data = weight.on_host
        self.copies.finish()  # before anybody else may have the places' memory
        self._active = False
        if self._closed:
            self.close()

    def _leave_layers(self) -> None:
        for layer in self._layers:
            ours = vars(layer.module).get("forward")
            if isinstance(ours, partial) and getattr(ours.func, "__self__", None) is self:
                before = ours.args[1]
                if getattr(before, "__func__", None) is type(layer.module).forward:
                    del layer.module.forward
                else:
                    layer.module.forward = before

    def __deepcopy__(self, memo: dict[int, Any]) -> HostWeights:
        """Of a copy of the model without weights, whose layers run as they are."""
        copied = object.__new__(HostWeights)
        copied._active = False
        return copied

    def _run(self, layer: int, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if not self._active:
            return forward(*args, **keywords)
        again = layer == self._backward  # computed again for its backward
        if not again:
            self._backward = None
        self._bring(layer)
        self._inside[layer] += 1
        try:
            turns = torch.is_grad_enabled() and layer == len(self._layers) - 1
            if not again and not turns:  # behind the last layer its backward comes
                self._bring_ahead((layer + 1) % len(self._layers))
            output = forward(*args, **keywords)
        finally:
            self._inside[layer] -= 1
        if torch.is_grad_enabled():
            for made in output if isinstance(output, tuple) else (output,):
                if isinstance(made, torch.Tensor) and made.requires_grad:
                    made.register_hook(partial(self._begin_backward, layer))
        return output

    def _begin_backward(self, layer: int, _: torch.Tensor) -> None:
        if layer != self._backward:
            self._backward = layer
            self._bring(layer)
            if layer > 0:
                self._bring_ahead(layer - 1)

    def _bring(self, layer: int) -> None:
        place = self._places[layer]
        with self._measured():
            if self._there[place] != layer:
                assert not self._is_used(self._there[place])
                self._load(layer)
            self.copies.wait(place)

    def _bring_ahead(self, layer: int) -> None:
        there = self._there[self._places[layer]]
        if there != layer and not self._is_used(there):
            with nullcontext() if self._device.type == "cuda" else self._measured():
                self._load(layer)

    def _measured(self) -> AbstractContextManager[None]:
        if self.stopwatch is None:
            return nullcontext()
        running: AbstractContextManager[None] = self.stopwatch.running(self._device)
        return running

    def _is_used(self, layer: int | None) -> bool:
        return layer is not None and (self._inside[layer] > 0 or layer == self._backward)

    def _load(self, layer: int) -> None:
        place, block = self._places[layer], self._layers[layer].block
        self._there[place] = None  # if it is interrupted
        # Of another version counter than the weights: autograd shall not see the weights change.
        self.copies.load(place, self._targets[place][: block.numel()].detach(), block)
        self._there[place] = layer
        self.loaded_bytes += block.numel()

    def _expect_in_place(self) -> None:
        for layer in self._layers:
            for weight in layer.weights:
                if weight.parameter.data_ptr() != weight.on_host.data_ptr():
                    raise Error(
                        f"{type(layer.module).__name__}: expected its frozen weights in the host "
                        "memory where Config(weights='host') has put them, got others (moved with "
                        "model.to(…), or replaced); make another engine for the model as it is now"
                    )


def movable_weights(layers: Iterable[nn.Module]) -> list[list[torch.Tensor]]:
    """Of each layer the frozen weights that are its own alone and lie densely in memory.

    Of torchao's weights it is their codes.
    """
    own = [list(dict.fromkeys(layer.parameters())) for layer in layers]
    uses = Counter(parameter for of_layer in own for parameter in of_layer)
    frozen = [[p for p in of_layer if not p.requires_grad and uses[p] == 1] for of_layer in own]
    dense = [[codes_of(p) if is_of_torchao(p) else p for p in of_layer] for of_layer in frozen]
    return [[weight for weight in of_layer if weight.is_contiguous()] for of_layer in dense]


def block_bytes(movable: Iterable[list[torch.Tensor]]) -> list[int]:
    """What the weights of each layer take in a block."""
    return [sum(map(_padded_bytes, of_layer)) for of_layer in movable]


def moved_to_host(causal: nn.Module, layers: Sequence[nn.Module], names: Sequence[str]) -> Any:
    """A model's frozen layer weights in host memory, and everything else on the device.

    The device is that of the embedding; where that is the CPU, the current GPU if there is one.
    """
    device: torch.device = causal.get_input_embeddings().weight.device  # type: ignore[operator]
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    _expect_movable(causal)
    weights = HostWeights(layers, names, device)
    moved = {id(w.parameter) for layer in weights._layers for w in layer.weights}
    for module in causal.modules():
        for parameter in module._parameters.values():
            if is_of_torchao(parameter):  # scales and zero points stay with compute
                for part in parts_of(parameter):
                    if id(part) not in moved:
                        _move(part, device)
            elif parameter is not None and id(parameter) not in moved:
                _move(parameter, device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:  # of bitsandbytes: scales, 3 % of the weights in 4 bits
            state.to(device)
    return weights


def _expect_movable(causal: nn.Module) -> None:
    for name, parameter in causal.named_parameters():
        kind = type(parameter).__name__
        if kind not in ("Parameter", "Params4bit") and not is_weight_only(parameter):
            raise UnsupportedModelError(
                f"{name}: Config(weights='host') moves plain weights, those in 4 bits of "
                f"bitsandbytes and weight-only ones of torchao, got {kind}; set weights='device', "
                "or load it in 4 bits"
            )
        if parameter.device.type == "meta":
            raise UnsupportedModelError(
                f"{name}: expected weights in memory, got none (device 'meta'); load the model on "
                "the CPU: device_map='cpu'"
            )
    for name, module in causal.named_modules():
        if hasattr(module, "_hf_hook"):
            raise UnsupportedModelError(
                f"{name}: accelerate moves its weights (device_map, cpu_offload), and so would "
                "Config(weights='host'); load the model with device_map='cpu'"
            )


def _padded_bytes(parameter: torch.Tensor) -> int:
    size = parameter.numel() * parameter.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _moved(
    module: nn.Module,
    parameters: list[torch.Tensor],
    size: int,
    target: torch.Tensor,
    device: torch.device,
) -> _Layer:
    block = host_block(size, device)
    weights, begin = [], 0
    for parameter in parameters:
        end = begin + parameter.numel() * parameter.element_size()

        def view(of: torch.Tensor, begin: int = begin, end: int = end) -> torch.Tensor:
            return of[begin:end].view(parameter.dtype).view(parameter.shape).detach()  # noqa: B023

        on_host = view(block)
        on_host.copy_(parameter.detach())
        weights.append(_Weight(parameter, on_host, view(target)))
        parameter.data = on_host
        begin += _padded_bytes(parameter)
    return _Layer(module, block, weights)


def _move(parameter: torch.Tensor, device: torch.device) -> None:
    grad = parameter.grad
    parameter.data = parameter.data.to(device)
    if grad is not None:
        parameter.grad = grad.to(device)
