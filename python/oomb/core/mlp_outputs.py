"""Outputs of MLPs on their way through the pages: from the fill's layers to the sweep's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from oomb.core.call_pages import CallPages, piece_of
from oomb.core.chunk_run import current_run


@dataclass(frozen=True)
class PagedMlpOutputs:
    """Keeps those that the call has pieces for, and gives each back once.

    Attributes:
        paged: by decoder layer, that of the pages.
    """

    pages: CallPages
    paged: Mapping[int, int]
    _kept: dict[tuple[int, int], torch.Size | None] = field(default_factory=dict)

    def takes_part(self, layer: int) -> bool:
        """Whether the output of the chunk that is run is one that is kept."""
        paged = self.paged.get(layer)
        return paged is not None and self._span(current_run().chunk, paged) is not None

    def keep(self, layer: int, y: torch.Tensor) -> None:
        """Of the fill; its first of a chunk and layer counts."""
        place = current_run().chunk, self.paged[layer]
        if place in self._kept:
            return
        of_all = self.pages.outputs.mlp_bytes[place[1]]
        if y.nbytes != of_all or not y.is_contiguous():  # a model's own way: the sweep computes it
            self._kept[place] = None
            return
        self._kept[place] = y.shape
        self.pages.keep_mlp(place[1], place[0], self._pieces(y))

    def take(self, layer: int, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Of the sweep: gives what was kept of rows like ``x``; None: it has to be computed."""
        place = current_run().chunk, self.paged[layer]
        shape = self._kept.pop(place, None)
        if shape is None:
            return None
        assert shape[:-1] == x.shape[:-1]

        def known() -> torch.Tensor:
            y = x.new_empty(shape)
            self.pages.take_mlp(place[1], place[0], self._pieces(y))
            return y

        return known

    def _pieces(self, y: torch.Tensor) -> Callable[[int, int, int], tuple[int, int]]:
        return partial(piece_of, (y,), self.pages.layout.slot_bytes)

    def _span(self, chunk: int, paged: int) -> tuple[int, int] | None:
        return self.pages.outputs.mlp_span(chunk, paged)
