"""Attention's outputs that the fill keeps for the sweep: which ones, and where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from oomb.core.layout import Chunks
from oomb.core.recompute import Recompute, levels_up_to
from oomb.core.tiers import PageLayout
from oomb.model.layer_shape import LayerShape

# FLOP that a byte must save to be worth a copy into a slot and out again: what a device computes
# meanwhile.
IN_DEVICE = {"cpu": 40.0, "cuda": 800.0}


class OverLink(Protocol):
    """What two trips over the link cost."""

    def least_worth(self, chunk: int, layer: int, flops: float, num_bytes: int) -> float:
        """FLOP that a byte of an output must save."""
        ...


@dataclass(frozen=True)
class KeptOutputs:
    """O and log-sum-exp of some chunks and layers, among the pages or in torch's memory.

    Among the pages they are cut into pieces of a slot. Pieces of a layer are numbered from its
    first kept chunk: those of O, then those of the log-sum-exp, chunk by chunk.

    Attributes:
        kept: bool [chunks, layers].
        slot_bytes: of a piece.
        o_bytes, lse_bytes: of a chunk, per layer.
        candidates: outputs that could be kept.
        levels: what backward computes again of each chunk, where outputs lie in torch's memory;
            empty: they lie among the pages.
    """

    kept: npt.NDArray[np.bool_]
    slot_bytes: int
    o_bytes: tuple[int, ...]
    lse_bytes: tuple[int, ...]
    candidates: int = 0
    levels: tuple[Recompute, ...] = ()

    @staticmethod
    def none(
        chunks: Chunks, layout: PageLayout, shapes: Sequence[LayerShape], batch: int
    ) -> KeptOutputs:
        """Nothing is kept, but it is known how large the outputs of a full chunk are."""
        rows = batch * chunks.chunk_size
        wide = layout.dtype == torch.float64
        return KeptOutputs(
            kept=np.zeros((chunks.number, len(shapes)), dtype=np.bool_),
            slot_bytes=layout.slot_bytes,
            o_bytes=tuple(
                rows * shape.query_heads * shape.head_dim * layout.element_bytes for shape in shapes
            ),
            lse_bytes=tuple(rows * shape.query_heads * (8 if wide else 4) for shape in shapes),
        )

    @property
    def loose(self) -> bool:
        """They lie in torch's memory."""
        return bool(self.levels)

    def loosened(self, activations: Sequence[int]) -> KeptOutputs:
        """In torch's memory, where that leaves some chunk more room than it has among the pages.

        There an output's room goes back when its chunk has been swept, and earlier chunks keep more
        of their activations in it. Never more is held than by the last chunk:

            swept       last       …         …         0
            outputs     █████████  ██████    ███       ·        of the chunks before it
            activations ██         █████     ████████  ████████████
                        layer      pointwise none      none

        Args:
            activations: bytes of a chunk's at each level of recompute, up to the call's.
        """
        if not self.kept.any():
            return self
        levels = levels_up_to(len(activations))
        of_chunk = [o + lse for o, lse in zip(self.o_bytes, self.lse_bytes, strict=True)]
        held = np.cumsum([0, *(self.kept @ np.array(of_chunk, dtype=np.int64))])
        most = int(held[-1]) + activations[-1]
        fitting = (
            (level for level, own in zip(levels, activations, strict=True) if own + before <= most)
            for before in held[:-1].tolist()
        )
        chosen = tuple(next(of_chunk, levels[-1]) for of_chunk in fitting)
        return self if set(chosen) == {levels[-1]} else replace(self, levels=chosen)

    def chunks_at(self, swept: Sequence[int], recompute: Recompute) -> dict[Recompute, int]:
        """Swept chunks by what backward computes again of them.

        Args:
            recompute: the call's.
        """
        return dict(Counter(self.levels[c] if self.loose else recompute for c in swept))

    def stats(self, swept: Sequence[int], recompute: Recompute) -> dict[str, Any]:
        """As :class:`oomb.results.Stats` has them; arguments as of :meth:`chunks_at`."""
        return {
            "kept_output_share": self.share,
            "kept_output_bytes": self.num_bytes,
            "loose_output_bytes": self.loose_bytes,
            "recomputed": self.chunks_at(swept, recompute),
        }

    def slots_of(self, layer: int) -> int:
        """Pieces of one chunk."""
        if self.loose:
            return 0
        return sum(-(-size // self.slot_bytes) for size in self._sizes(layer))

    @cached_property
    def slots(self) -> int:
        """Pieces of all that is kept."""
        return int(sum(self.slots_of(layer) * n for layer, n in enumerate(self.kept.sum(axis=0))))

    @property
    def num_bytes(self) -> int:
        """Memory of all that is kept."""
        return self.loose_bytes if self.loose else self.slots * self.slot_bytes

    @property
    def loose_bytes(self) -> int:
        """Of torch's memory."""
        if not self.loose:
            return 0
        return int(sum(sum(self._sizes(i)) * int(n) for i, n in enumerate(self.kept.sum(axis=0))))

    @property
    def share(self) -> float:
        """Of the outputs that could be kept."""
        return float(self.kept.sum() / self.candidates) if self.candidates else 0.0

    @property
    def pieces_of_layer(self) -> int:
        """Most pieces that a layer has."""
        return max(self.slots_of(layer) * int(n) for layer, n in enumerate(self.kept.sum(axis=0)))

    def span(self, chunk: int, layer: int) -> tuple[int, int] | tuple[()] | None:
        """First piece and last + 1 of an output; empty: it has none; None: it is not kept."""
        if not self.kept[chunk, layer]:
            return None
        if self.loose:
            return ()
        first = self._rank[chunk, layer] * self.slots_of(layer)
        return int(first), int(first) + self.slots_of(layer)

    def parts(self, chunk: int, layer: int) -> list[tuple[int, int]]:
        """Pieces [begin, end) of O and of the log-sum-exp of a kept output."""
        span = self.span(chunk, layer)
        assert span
        middle = span[0] + -(-self.o_bytes[layer] // self.slot_bytes)
        return [(span[0], middle), (middle, span[1])]

    @cached_property
    def _rank(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.kept, axis=0) - self.kept

    def _sizes(self, layer: int) -> tuple[int, int]:
        return self.o_bytes[layer], self.lse_bytes[layer]


@dataclass(frozen=True)
class Keeping:
    """What could be kept in a call, the most worthwhile first.

    The last layer's output is not there in the fill, which ends at the last keys and values that
    are stored; nor is that of the last chunk, which is not filled.

    Attributes:
        none: sizes, and nothing kept.
        order: (chunk, layer) by the work that a byte of it saves, later chunks first among equals.
        worth: FLOP of attention's forward that each of them saves per byte.
    """

    none: KeptOutputs
    order: tuple[tuple[int, int], ...]
    worth: tuple[float, ...]

    @staticmethod
    def of(
        none: KeptOutputs,
        chunks: Chunks,
        shapes: Sequence[LayerShape],
        swept: Sequence[int],
        batch: int,
        budget: int | None,
        fill_attends: int | None = None,
    ) -> Keeping:
        """
        Args:
            fill_attends: layers whose attention the fill runs; None: all but the last.
            swept: chunks that receive gradient, ascending.
            budget: past tokens that a query sees at most, where there is no window; None: all.
        """

        @cache  # most layers are alike
        def worth(chunk: int, of_pair: float, window: int, num_bytes: int) -> float:
            return of_pair * _pairs(chunks, chunk, window or None, budget) / num_bytes

        kinds = [
            (4.0 * batch * shape.query_heads * shape.head_dim, shape.window, o + lse)
            for shape, o, lse in zip(shapes, none.o_bytes, none.lse_bytes, strict=True)
        ]
        found = {
            (chunk, layer): worth(chunk, *kind)
            for chunk in swept[:-1]
            if _is_whole(chunks, chunk)
            for layer, kind in enumerate(kinds[: -1 if fill_attends is None else fill_attends])
        }
        order = sorted(found, key=lambda place: (-found[place], -place[0], place[1]))
        return Keeping(none, tuple(order), tuple(found[place] for place in order))

    def first(self, number: int) -> KeptOutputs:
        """The ``number`` most worthwhile ones."""
        kept = np.zeros_like(self.none.kept)
        for place in self.order[:number]:
            kept[place] = True
        return replace(self.none, kept=kept, candidates=len(self.order))

    def share(self, share: float) -> KeptOutputs:
        """That share of all there are."""
        return self.first(round(share * len(self.order)))

    def most_within(self, slots: int) -> int:
        """How many of the first ones fit so many slots."""
        return self._while(lambda _, used: used <= slots)

    def worthwhile(
        self, device_slots: int, all_slots: int, device: str, link: OverLink
    ) -> KeptOutputs:
        """Those that save more time than their copies take.

        Args:
            device_slots: beside the call's pages on the device; what does not fit there goes to
                the host and back.
            all_slots: beside the call's pages in both tiers.
            device: ``"cpu"`` or ``"cuda"``.
        """
        sizes = [o + lse for o, lse in zip(self.none.o_bytes, self.none.lse_bytes, strict=True)]

        def pays(index: int, used: int) -> bool:
            if used > all_slots:
                return False
            least, (chunk, layer) = IN_DEVICE[device], self.order[index]
            if used > device_slots:
                flops = self.worth[index] * sizes[layer]
                least += link.least_worth(chunk, layer, flops, sizes[layer])
            return self.worth[index] >= least

        return self.first(self._while(pays))

    def _while(self, holds: Callable[[int, int], bool]) -> int:
        used = 0
        for index, (_, layer) in enumerate(self.order):
            used += self.none.slots_of(layer)
            if not holds(index, used):
                return index
        return len(self.order)


def _is_whole(chunks: Chunks, chunk: int) -> bool:
    """Whether its output has the size that pieces are counted for."""
    begin, end = chunks.span(chunk)
    return end - begin == chunks.chunk_size


def _pairs(chunks: Chunks, chunk: int, window: int | None, budget: int | None) -> float:
    """(query, key) pairs of a chunk's attention in one head."""
    begin, end = chunks.span(chunk)
    tokens, begin = end - begin, chunks.past_tokens(chunk)
    own = tokens * (tokens + 1) / 2
    if window is not None:
        return min(own + float(tokens) * begin, float(tokens) * window)
    return own + float(tokens) * (begin if budget is None else min(begin, budget))
