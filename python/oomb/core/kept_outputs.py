"""Outputs that the fill keeps for the sweep: which ones, and where they lie.

They are attention's, and those of the last product of a layer's MLP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oomb.core.layout import Chunks
from oomb.core.recompute import Recompute, levels_up_to
from oomb.core.tiers import PageLayout
from oomb.model.layer_shape import LayerShape


@dataclass(frozen=True)
class ByTokens:
    """How an output is kept where ranks divide heads: o [B, all heads, own tokens, D].

    The sweep has it for the layer without an exchange. Its log-sum-exp stays as it was computed.

    Attributes:
        heads, tokens: held here, and of the chunk: those of the log-sum-exp.
        send: o of these heads and tokens → that of all heads, of the tokens that run here.
    """

    heads: int
    tokens: int
    send: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class KeptOutputs:
    """O and log-sum-exp of some chunks and layers, among the pages or in torch's memory; and what
    the MLP gave of some, among the pages.

    Among the pages they are cut into pieces of a slot. Pieces of a layer are numbered from its
    first kept chunk: those of O, then those of the log-sum-exp, chunk by chunk; behind them those
    of the MLP, chunk by chunk.

    Attributes:
        kept: bool [chunks, layers].
        slot_bytes: of a piece.
        o_bytes, lse_bytes: of a chunk, per layer.
        candidates: outputs of attention that could be kept.
        kept_mlp: bool [chunks, layers]; None: nothing of MLPs.
        mlp_bytes: of a chunk, per layer; 0: nothing of this layer's could be kept.
        levels: what backward computes again of each chunk, where outputs lie in torch's memory;
            empty: they lie among the pages.
    """

    kept: npt.NDArray[np.bool_]
    slot_bytes: int
    o_bytes: tuple[int, ...]
    lse_bytes: tuple[int, ...]
    candidates: int = 0
    kept_mlp: npt.NDArray[np.bool_] | None = None
    mlp_bytes: tuple[int, ...] = ()
    levels: tuple[Recompute, ...] = ()

    @staticmethod
    def none(
        chunks: Chunks,
        layout: PageLayout,
        shapes: Sequence[LayerShape],
        batch: int,
        mlp_bytes: tuple[int, ...] = (),
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
            mlp_bytes=mlp_bytes,
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
        if set(chosen) == {levels[-1]}:
            return self
        return replace(self, levels=chosen)

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
            "kept_mlp_output_bytes": self.mlp_slots * self.slot_bytes,
            "recomputed": self.chunks_at(swept, recompute),
        }

    def slots_of(self, layer: int) -> int:
        """Pieces of attention's output of one chunk."""
        if self.loose:
            return 0
        return sum(-(-size // self.slot_bytes) for size in self._sizes(layer))

    def mlp_slots_of(self, layer: int) -> int:
        """Pieces of the MLP's output of one chunk."""
        return -(-self.mlp_bytes[layer] // self.slot_bytes) if self.mlp_bytes else 0

    def slots_of_chunk(self, chunk: int, layer: int) -> int:
        """Pieces that are kept of a chunk's layer."""
        slots = self.slots_of(layer) if self.kept[chunk, layer] else 0
        if self.kept_mlp is not None and self.kept_mlp[chunk, layer]:
            slots += self.mlp_slots_of(layer)
        return slots

    @cached_property
    def slots(self) -> int:
        """Pieces of all that is kept."""
        return self._attention_slots + self.mlp_slots

    @property
    def _attention_slots(self) -> int:
        return sum(self._of_layers)

    @property
    def mlp_slots(self) -> int:
        """Of them those of MLPs."""
        return sum(self._mlps_of_layers)

    @cached_property
    def _of_layers(self) -> list[int]:
        """Pieces of attention's outputs of each layer."""
        return [self.slots_of(layer) * int(n) for layer, n in enumerate(self.kept.sum(axis=0))]

    @cached_property
    def _mlps_of_layers(self) -> list[int]:
        """Pieces of MLPs' outputs of each layer."""
        if self.kept_mlp is None:
            return [0] * self.kept.shape[1]
        chunks = self.kept_mlp.sum(axis=0)
        return [self.mlp_slots_of(layer) * int(n) for layer, n in enumerate(chunks)]

    @property
    def num_bytes(self) -> int:
        """Memory of attention's outputs that are kept."""
        return self.loose_bytes if self.loose else self._attention_slots * self.slot_bytes

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
        both = zip(self._of_layers, self._mlps_of_layers, strict=True)
        return max(of_attention + of_mlp for of_attention, of_mlp in both)

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

    def mlp_span(self, chunk: int, layer: int) -> tuple[int, int] | None:
        """First piece and last + 1 of the MLP's output; None: it is not kept."""
        if self.kept_mlp is None or not self.kept_mlp[chunk, layer]:
            return None
        slots = self.mlp_slots_of(layer)
        first = self._of_layers[layer] + int(self._mlp_rank[chunk, layer]) * slots
        return first, first + slots

    @cached_property
    def _mlp_rank(self) -> npt.NDArray[np.int64]:
        assert self.kept_mlp is not None
        return np.cumsum(self.kept_mlp, axis=0) - self.kept_mlp

    @cached_property
    def _rank(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.kept, axis=0) - self.kept

    def _sizes(self, layer: int) -> tuple[int, int]:
        return self.o_bytes[layer], self.lse_bytes[layer]
