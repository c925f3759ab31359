"""Sums of the gradients of decoder layers in host memory, on the device while their layer adds.

Where ranks share weights a rank keeps its shards of the sums so. Whole sums of a layer are made on
the device for each chunk, and what the ranks scatter of them is what is added.

    compute   backward of  [ layer 5 ][ layer 4 ][ layer 3 ] …
    load                   [   4     ][   3     ][   2     ]
    store                  [   6     ][   5     ][   4     ]

The backward goes down the layers. When a layer first adds to a sum, those of the layer above go to
the host and those of the layer below come; the device has three places for them. Who adds in
another order waits longer, and gets the same sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from oomb.config import Config
from oomb.core.inputs import expect
from oomb.core.rounded_sums import sum_dtype
from oomb.core.tiers import free_memory
from oomb.errors import OutOfMemoryError
from oomb.model.host_memory import host_block
from oomb.model.swap import Swaps
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights
from oomb.units import bytes_text

PLACES = 3
WHOLE_SUMS = "sharded_weights='zero1', whose sums are whole until a call ends (take 'zero2')"
_ALIGNMENT = 256  # bytes, of a sum in its layer's block


class SumCopies:
    """Copies between blocks of layers on the host and places on the device; on a CPU, where one is
    done when it has begun."""

    def load(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy to the device, behind what compute was given so far and behind the stores
        from the place and to the layer's block."""
        target.copy_(source)

    def store(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy to the host, behind what compute was given so far."""
        target.copy_(source)

    def wait(self, place: int) -> None:
        """Let compute go on when the place's copies are done."""

    def finish(self) -> None:
        """Return when all is copied."""


class SumCopiesBeside(SumCopies):
    """On a GPU: a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loads, self._stores = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._of_place: dict[int, torch.cuda.Event] = {}
        self._stored: dict[int, torch.cuda.Event] = {}  # by layer

    def load(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        for event in (self._of_place.get(place), self._stored.get(layer)):
            if event is not None:
                self._loads.wait_event(event)
        self._of_place[place] = self._copied(self._loads, target, source)

    def store(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self._of_place[place] = self._copied(self._stores, target, source)
        self._stored[layer] = self._of_place[place]

    def wait(self, place: int) -> None:
        if place in self._of_place:
            torch.cuda.current_stream(self._device).wait_event(self._of_place[place])

    def finish(self) -> None:
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._loads)
        compute.wait_stream(self._stores)
        self._stores.synchronize()  # the host reads them now
        self._of_place, self._stored = {}, {}

    def _copied(
        self, stream: torch.cuda.Stream, to: torch.Tensor, of: torch.Tensor
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        return copied


class HostSums:
    """Sums of some parameters, by layer.

    Args:
        layers: of each layer the parameters whose sums are kept on the host.
        main_grad_dtype: as in :class:`oomb.Config`.
        device: of the parameters.
        weights: which of them stand for shards, whose sums are then shards too.
        neighbours: processes that share the host's memory, each with such sums.

    Attributes:
        host_bytes: of the blocks.
        moved_bytes: that were copied in the last call, both ways together.
        copies: how they are copied; a test may put others in place.

    Raises:
        OutOfMemoryError: the host has no room for them.
    """

    def __init__(
        self,
        layers: Sequence[list[nn.Parameter]],
        main_grad_dtype: str,
        device: torch.device,
        weights: Weights,
        neighbours: int = 1,
    ) -> None:
        self._device = device
        self._shards = {p for own in layers for p in own if weights.is_shard(p)}
        self._places_of = {p: layer for layer, own in enumerate(layers) for p in own}
        self._parts: dict[nn.Parameter, tuple[int, int, torch.dtype, torch.Size]] = {}
        sizes = []
        for own in layers:
            begin = 0
            for parameter in own:
                dtype = sum_dtype(parameter, main_grad_dtype)
                shape = weights.sum_shape(parameter)
                num_bytes = shape.numel() * dtype.itemsize
                self._parts[parameter] = begin, begin + num_bytes, dtype, shape
                begin += _padded(num_bytes)
            sizes.append(begin)
        self.host_bytes, self._largest = sum(sizes), max(sizes, default=0)
        self.moved_bytes = 0
        free = free_memory(torch.device("cpu")) // neighbours
        if self.host_bytes > free:
            raise OutOfMemoryError(
                f"main_grad_device='host': the gradient sums of the layers take "
                f"{bytes_text(self.host_bytes)} of the host, {bytes_text(free)} are free; set "
                "main_grad_dtype='bfloat16' for half of it, or main_grad_device='device'",
                needed_bytes=self.host_bytes,
                available_bytes=free,
            )
        self._blocks = [host_block(size, device) for size in sizes]
        on_gpu = device.type == "cuda"
        self.copies: SumCopies = SumCopiesBeside(device) if on_gpu else SumCopies()
        self._on_device: list[torch.Tensor] = []
        self._begun: set[nn.Parameter] = set()  # those that have a sum in this call
        self._there: list[int | None] = [None] * PLACES  # of each place, the layer that it has
        self._at: int | None = None  # the layer that adds
        self._latest = 0  # the place that was loaded last

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._parts

    def has_whole(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's whole sum is kept here."""
        return parameter in self._parts and parameter not in self._shards

    def has_shard(self, parameter: nn.Parameter) -> bool:
        """Whether a rank's shard of a parameter's sum is kept here."""
        return parameter in self._shards

    def begin(self) -> None:
        """A call begins, without sums."""
        self.drop()
        self.moved_bytes = 0
        self.resume()

    def resume(self) -> None:
        """The sums may come to the device again, and be changed there."""
        size = self._largest
        self._on_device = list(torch.empty(PLACES, size, dtype=torch.uint8, device=self._device))

    def end(self) -> None:
        """All sums are on the host, and the device's memory is given back."""
        if self._on_device:
            if self._at is not None:
                self._store(self._at)
            self.copies.finish()
        self._on_device, self._there, self._at = [], [None] * PLACES, None

    def drop(self) -> None:
        """Forget all sums."""
        self.end()
        self._begun.clear()

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum so far: on the device during a call, on the host behind it. None: there is none.

        On the device it may be read and added to until another layer's is asked for.
        """
        if parameter not in self._begun:
            return None
        if not self._on_device:
            return self._view(self._blocks[self._places_of[parameter]], parameter)
        return self._view(self._bring(self._places_of[parameter]), parameter)

    def new(self, parameter: nn.Parameter) -> torch.Tensor:
        """A place for a sum that begins, on the device; whatever it holds."""
        place = self._bring(self._places_of[parameter])
        self._begun.add(parameter)
        return self._view(place, parameter)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether it has a sum, which does not move for this."""
        return parameter in self._begun

    def by_layer(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Those whose sums are kept here, a list for each layer, the last one first."""
        here = sorted((p for p in parameters if p in self), key=lambda p: -self._places_of[p])
        return [list(own) for _, own in groupby(here, key=self._places_of.__getitem__)]

    def forget(self, parameter: nn.Parameter) -> None:
        """Its sum has been taken."""
        self._begun.discard(parameter)

    def _view(self, block: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        begin, end, dtype, shape = self._parts[parameter]
        return block[begin:end].view(dtype).view(shape)

    def _bring(self, layer: int) -> torch.Tensor:
        """The place with a layer's sums."""
        if self._at != layer:
            if self._at is not None:
                self._store(self._at)
            if layer not in self._there:
                self._load(layer)
            self._at = layer
            self.copies.wait(self._there.index(layer))
            below = (layer - 1) % len(self._blocks)  # of the first layer: the next chunk's last
            if below not in self._there:
                self._load(below)
        return self._on_device[self._there.index(layer)]

    def _load(self, layer: int) -> None:
        place = (self._latest + 1) % PLACES
        if self._at is not None and self._there[place] == self._at:
            place = (place + 1) % PLACES
        self._latest, self._there[place] = place, layer
        if any(self._places_of[p] == layer for p in self._begun):
            block = self._blocks[layer]
            self.copies.load(place, layer, self._on_device[place][: block.numel()], block)
            self.moved_bytes += block.numel()

    def _store(self, layer: int) -> None:
        place, block = self._there.index(layer), self._blocks[layer]
        self.copies.store(place, layer, block, self._on_device[place][: block.numel()])
        self.moved_bytes += block.numel()


def host_sums_of(
    layers: Iterable[nn.Module],
    config: Config,
    device: torch.device,
    placement: Placement,
    weights: Weights,
) -> HostSums | None:
    """Sums as ``config`` places them; None: all on the device.

    Raises:
        ValueError: on the host, and ranks have shards of the weights, but whole sums.
        OutOfMemoryError: the host has no room for them.
    """
    if config.main_grad_device == "device":
        return None
    is_whole = weights.is_sharded and config.sharded_weights == "zero1"
    expect(not is_whole, "main_grad_device", f"'device' beside {WHOLE_SUMS}", "'host'")
    with Swaps() as swaps:
        weights.begin(swaps.afterwards)  # a call has these parameters
        own, dtype = own_parameters(layers), config.main_grad_dtype
        return HostSums(own, dtype, device, weights, placement.neighbours)


def own_parameters(layers: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """Of each layer the trained parameters that are its own alone."""
    of_layers = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    uses = Counter(p for own in of_layers for p in dict.fromkeys(own))
    return [[p for p in dict.fromkeys(own) if uses[p] == 1] for own in of_layers]


def layer_bytes(
    layers: Iterable[Iterable[nn.Parameter]], main_grad_dtype: str, weights: Weights
) -> list[int]:
    """What the sums of each layer take on this rank."""

    def size(parameter: nn.Parameter) -> int:
        values = weights.sum_shape(parameter).numel()
        return _padded(values * sum_dtype(parameter, main_grad_dtype).itemsize)

    return [sum(map(size, own)) for own in layers]


def spared_bytes(sizes: Sequence[int]) -> int:
    """Of the device, where sums of so many bytes by layer are on the host."""
    return max(0, sum(sizes) - PLACES * max(sizes, default=0))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
