"""What a call could keep of its fill, the most worthwhile first, and how much of it pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np

from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import Chunks
from oomb.model.layer_shape import LayerShape

# FLOP that a byte must save to be worth a copy into a slot and out again: what a device computes
# meanwhile.
IN_DEVICE = {"cpu": 40.0, "cuda": 800.0}
# A matrix product's FLOP are done in less time than attention's: 690 and 480 TFLOP/s on an H200.
PRODUCT_SPEED = 1.4

Place = tuple[int, int]  # chunk and layer


class OverLink(Protocol):
    """What two trips over the link cost."""

    def least_worth(self, chunk: int, layer: int, flops: float, num_bytes: int) -> float:
        """FLOP that a byte of attention's output must save."""
        ...

    def least_worth_of_mlp(
        self, chunk: int, layer: int, flops: float, num_bytes: int, beside: int
    ) -> float:
        """FLOP that a byte of the MLP's output must save."""
        ...


@dataclass(frozen=True)
class MlpOutput:
    """What the last product of a layer's MLP gives, on this rank.

    Attributes:
        inputs: values that are summed for one of the output.
        element_bytes: of a value.
        chunk_bytes: of the output of a full chunk.
    """

    inputs: int
    element_bytes: int
    chunk_bytes: int

    @property
    def worth(self) -> float:
        """FLOP of attention that take as long as what a byte saves."""
        return 2.0 * self.inputs / self.element_bytes / PRODUCT_SPEED


@dataclass(frozen=True)
class Keeping:
    """What could be kept in a call, the most worthwhile first.

    The last layer's output is not there in the fill, which ends at the last keys and values that
    are stored; nor is that of the last chunk, which is not filled.

    Attributes:
        none: sizes, and nothing kept.
        order: (chunk, layer) by the work that a byte of attention's output saves, later chunks
            first among equals.
        worth: FLOP of attention's forward that each of them saves per byte.
        mlp_order, mlp_worth: the same of MLPs' outputs.
    """

    none: KeptOutputs
    order: tuple[Place, ...]
    worth: tuple[float, ...]
    mlp_order: tuple[Place, ...] = ()
    mlp_worth: tuple[float, ...] = ()

    @staticmethod
    def of(
        none: KeptOutputs,
        chunks: Chunks,
        shapes: Sequence[LayerShape],
        swept: Sequence[int],
        batch: int,
        budget: int | None,
        fill_attends: int | None = None,
        mlps: Sequence[MlpOutput | None] = (),
    ) -> Keeping:
        """
        Args:
            fill_attends: layers whose attention the fill runs; None: all but the last.
            swept: chunks that receive gradient, ascending.
            budget: past tokens that a query sees at most, where there is no window; None: all.
            mlps: of each layer; None: nothing of it can be kept.
        """

        @cache  # most layers are alike
        def worth(chunk: int, of_pair: float, window: int, num_bytes: int) -> float:
            return of_pair * _pairs(chunks, chunk, window or None, budget) / num_bytes

        kinds = [
            (4.0 * batch * shape.query_heads * shape.head_dim, shape.window, o + lse)
            for shape, o, lse in zip(shapes, none.o_bytes, none.lse_bytes, strict=True)
        ]
        attending = -1 if fill_attends is None else fill_attends
        whole = [chunk for chunk in swept[:-1] if _is_whole(chunks, chunk)]
        found = {
            (chunk, layer): worth(chunk, *kind)
            for chunk in whole
            for layer, kind in enumerate(kinds[:attending])
        }
        of_mlps = {
            (chunk, layer): mlp.worth
            for chunk in whole
            for layer, mlp in enumerate(mlps[:attending])
            if mlp is not None
        }
        return Keeping(none, *_ordered(found), *_ordered(of_mlps))

    @property
    def of_attention(self) -> Keeping:
        """Its outputs alone."""
        return replace(self, mlp_order=(), mlp_worth=())

    def pays(self, device: str) -> bool:
        """Whether anything of it could, whatever room there is.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
        """
        best = max((*self.worth[:1], *self.mlp_worth[:1]), default=0.0)
        return best >= IN_DEVICE[device]

    def flops(self, outputs: KeptOutputs) -> float:
        """Of attention that take as long as what the sweep leaves out where these are kept."""
        sizes = [o + lse for o, lse in zip(self.none.o_bytes, self.none.lse_bytes, strict=True)]
        of_attention = sum(
            worth * sizes[place[1]]
            for place, worth in zip(self.order, self.worth, strict=True)
            if outputs.kept[place]
        )
        of_mlps = sum(
            worth * self.none.mlp_bytes[place[1]]
            for place, worth in zip(self.mlp_order, self.mlp_worth, strict=True)
            if outputs.kept_mlp is not None and outputs.kept_mlp[place]
        )
        return of_attention + of_mlps

    def first(self, number: int, of_mlps: int = 0) -> KeptOutputs:
        """The ``number`` most worthwhile ones of attention, and so many of MLPs."""
        kept, kept_mlp = np.zeros_like(self.none.kept), None
        for place in self.order[:number]:
            kept[place] = True
        if of_mlps:
            kept_mlp = np.zeros_like(self.none.kept)
            for place in self.mlp_order[:of_mlps]:
                kept_mlp[place] = True
        return replace(self.none, kept=kept, candidates=len(self.order), kept_mlp=kept_mlp)

    def share(self, share: float) -> KeptOutputs:
        """That share of attention's."""
        return self.first(round(share * len(self.order)))

    def most_within(self, slots: int) -> int:
        """How many of attention's first ones fit so many slots."""
        for index, (_, layer) in enumerate(self.order):
            slots -= self.none.slots_of(layer)
            if slots < 0:
                return index
        return len(self.order)

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
        flops: dict[Place, float] = {
            place: worth * sizes[place[1]]
            for place, worth in zip(self.order, self.worth, strict=True)
        }

        def pays(place: Place, worth: float, used: int, *, of_mlp: bool) -> bool:
            if used > all_slots:
                return False
            least, (chunk, layer) = IN_DEVICE[device], place
            if used > device_slots and of_mlp:
                least += link.least_worth_of_mlp(
                    chunk, layer, flops[place], self.none.mlp_bytes[layer], sizes[layer]
                )
            elif used > device_slots:
                least += link.least_worth(chunk, layer, flops[place], sizes[layer])
            return worth >= least

        used, numbers, ended = 0, [0, 0], [False, False]
        for place, worth, of_mlp in self._merged():
            if ended[of_mlp]:
                continue
            slots = self.none.mlp_slots_of if of_mlp else self.none.slots_of
            if pays(place, worth, used + slots(place[1]), of_mlp=of_mlp):
                used += slots(place[1])
                numbers[of_mlp] += 1
            else:
                ended[of_mlp] = True
        return self.first(*numbers)

    def _merged(self) -> Iterator[tuple[Place, float, bool]]:
        """All of them, the most worthwhile first, and whether it is an MLP's."""
        mlps, index = list(zip(self.mlp_order, self.mlp_worth, strict=True)), 0
        for place, worth in zip(self.order, self.worth, strict=True):
            while index < len(mlps) and mlps[index][1] > worth:
                yield *mlps[index], True
                index += 1
            yield place, worth, False
        for of_mlp in mlps[index:]:
            yield *of_mlp, True


def _ordered(found: dict[Place, float]) -> tuple[tuple[Place, ...], tuple[float, ...]]:
    order = sorted(found, key=lambda place: (-found[place], -place[0], place[1]))
    return tuple(order), tuple(found[place] for place in order)


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
