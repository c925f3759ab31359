"""The page lists of a call: how large they are, and where.

A chunk's lists are with the kernels while it runs, and on the host between its visits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from oomb import _C
from oomb.config import PageRule
from oomb.core.layout import Chunks
from oomb.core.tiers import free_memory
from oomb.errors import OutOfMemoryError
from oomb.model.layer_shape import LayerShape
from oomb.ops.launch import stream_of
from oomb.results import Selection


@dataclass(frozen=True)
class ListSizes:
    """Sizes of the page lists of one call, int32.

    Attributes:
        layers: number of layers that choose.
    """

    rule: PageRule
    chunks: Chunks
    layers: int
    batch: int
    kv_heads: int

    @staticmethod
    def of(rule: PageRule, chunks: Chunks, shapes: Sequence[LayerShape], batch: int) -> ListSizes:
        """Layers with a sliding window see their past whole, and have none."""
        choosing = [shape for shape in shapes if not shape.window]
        heads = choosing[0].kv_heads if choosing else 1
        return ListSizes(rule, chunks, len(choosing), batch, heads)

    @property
    def first_chunk(self) -> int:
        """The first chunk whose past holds more pages than a list: there a choice begins."""
        numbers = range(self.chunks.number)
        return next((c for c in numbers if self.chooses(c)), self.chunks.number)

    def of_layer(self, chunk: int) -> tuple[int, int, int, int]:
        """Shape [batch, query blocks, heads or 1, max_pages] of the lists of a layer and chunk."""
        begin, end = self.chunks.span(chunk)
        blocks = -(-(end - begin) // self.chunks.page_size)
        return self.batch, blocks, self._heads, self.rule.max_pages

    @property
    def of_call(self) -> tuple[int, int, int]:
        """Shape [chunks that choose, layers, words of a whole chunk]."""
        words = self.batch * self.chunks.most_pages * self._heads * self.rule.max_pages
        return self.chunks.number - self.first_chunk, self.layers, words

    @property
    def chunk_bytes(self) -> int:
        """All layers of a chunk."""
        _, layers, words = self.of_call
        return 4 * layers * words

    @property
    def num_bytes(self) -> int:
        """All of the call."""
        return self.of_call[0] * self.chunk_bytes

    def host_bytes(self, device_type: str) -> int:
        """Host memory that they take. A GPU reads them in pinned memory, which torch hands out in
        powers of two."""
        if device_type != "cuda" or self.num_bytes == 0:
            return self.num_bytes
        return 1 << (self.num_bytes - 1).bit_length()

    @property
    def _heads(self) -> int:
        return 1 if self.rule.share == "all_heads" else self.kv_heads

    def chooses(self, chunk: int) -> bool:
        """Whether a chunk's past holds more pages than a list."""
        return self.chunks.past_pages(chunk) > self.rule.max_pages


_AT_ONCE = 2  # chunks that are run, where they take turns


class PageLists:
    """Page lists of one call under :class:`oomb.PageRule`, kept from the fill for the sweep.

    A list is born on the device and kept in host memory; the device has those of the chunks being
    run alone. When a kept chunk is swept, one kernel brings the lists of all its layers back: host
    memory is pinned and kernels read and write it, as a copy would wait behind the pages that are
    on their way.

    Lists of a layer and chunk are [batch, query blocks, heads or 1, budget], ascending, -1 padded.

    Args:
        layers: those that choose.
        max_pages: past pages of the longest sequence.
        keeps: the host keeps them to the end of the call, for a sweep or the caller; else for the
            chunks being run alone.

    Raises:
        OutOfMemoryError: the host has no memory for them.
    """

    def __init__(
        self,
        sizes: ListSizes,
        layers: Sequence[int],
        max_pages: int,
        device: torch.device,
        *,
        keeps: bool,
    ) -> None:
        self._sizes = sizes
        self._max_pages = max_pages
        self._first = sizes.first_chunk
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._device = device
        chunks, *of_chunk = sizes.of_call
        rows = chunks if keeps else min(chunks, _AT_ONCE)
        self._host = _on_host((rows, *of_chunk), device)
        self._kept: set[tuple[int, int]] = set()
        self._on_device: dict[int, dict[int, torch.Tensor]] = {}  # by chunk and layer

    def wanted(self, layer: int, chunk: int) -> bool:
        """Whether there is a choice, and none was made."""
        chooses = layer in self._row and self._sizes.chooses(chunk)
        return chooses and (layer, chunk) not in self._kept

    def known(self, layer: int, chunk: int) -> bool:
        """Whether a choice was made."""
        return (layer, chunk) in self._kept

    def keep(self, layer: int, chunk: int, lists: torch.Tensor) -> None:
        """Take the lists of a chunk that is being run, on the device."""
        self._kept.add((layer, chunk))
        self._on_device[chunk][layer] = lists
        self._copy(lists, self._host_view(layer, chunk))

    def start(self, chunk: int) -> None:
        """Bring the lists that were kept of a chunk to the device."""
        layers = [layer for layer in self._row if (layer, chunk) in self._kept]
        lists = self._on_device[chunk] = {}
        if layers:
            rows = self._host_rows(chunk)
            if self._device.type == "cuda":
                kept, rows = rows, torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
                self._copy(kept, rows)
            for layer in layers:
                lists[layer] = self._view(rows[self._row[layer]], chunk)

    def finish(self, chunk: int) -> None:
        """The device needs the lists of a chunk no more, until it is started again."""
        del self._on_device[chunk]

    def on_device(self, layer: int, chunk: int) -> torch.Tensor | None:
        """Lists of a chunk that is being run. None: its past holds no more pages than the budget,
        or the layer has a window, and what it may see is seen whole."""
        return self._on_device[chunk].get(layer)

    def of_call(self, num_layers: int) -> Selection:
        """``[layer][chunk]``, on the host, for ``step.selection``."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

        def kept(layer: int, chunk: int) -> torch.Tensor | None:
            there = (layer, chunk) in self._kept
            return self._host_view(layer, chunk).clone() if there else None

        return [
            [kept(layer, chunk) for chunk in range(self._sizes.chunks.number)]
            for layer in range(num_layers)
        ]

    def pages(self, layer: int, chunk: int) -> npt.NDArray[np.int64]:
        """Distinct pages of kept lists, as sequence * max_pages + page, ascending.

        On a GPU right when all is done that its stream had been given with :meth:`keep`.
        """
        of_sequence = self._host_view(layer, chunk).numpy().reshape(self._sizes.batch, -1)
        seen = np.zeros((self._sizes.batch, self._max_pages + 1), dtype=bool)
        for row, pages in zip(seen, of_sequence, strict=True):
            row[pages] = True  # of the padding, -1, the last
        return np.flatnonzero(seen[:, :-1])

    def _host_view(self, layer: int, chunk: int) -> torch.Tensor:
        return self._view(self._host_rows(chunk)[self._row[layer]], chunk)

    def _host_rows(self, chunk: int) -> torch.Tensor:
        return self._host[(chunk - self._first) % len(self._host)]

    def _view(self, words: torch.Tensor, chunk: int) -> torch.Tensor:
        shape = self._sizes.of_layer(chunk)
        return words[: math.prod(shape)].view(shape)

    def _copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        if self._device.type == "cuda":
            _C.copy_mapped(
                source=source.data_ptr(),
                destination=destination.data_ptr(),
                words=source.numel(),
                stream=stream_of(self._device),
            )
        else:
            destination.copy_(source)


def _on_host(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Host memory, pinned where a GPU reads and writes it."""
    needed = 4 * math.prod(shape)
    pinned = device.type == "cuda" and needed > 0
    try:
        return torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
    except RuntimeError as error:
        raise OutOfMemoryError(
            f"the page lists of the call need {needed} bytes of host memory: the host is out of "
            "memory. Lower the budget of the page rule or shorten the sequence",
            needed_bytes=needed,
            available_bytes=free_memory(torch.device("cpu")),
        ) from error
