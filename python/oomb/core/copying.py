"""What it costs to keep an output of attention, in work that the device could do meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from oomb.core.layout import first_page_in_window
from oomb.core.page_demand import PageDemand


@dataclass(frozen=True)
class Machinery:
    """What a kind of device computes beside its copies.

    Attributes:
        over_link: FLOP while a byte goes one way over the link to the host, at most. Where a device
            computes less in that time, its link hides more than is counted on.
        hidden: part of a chunk's computing behind which copies can hide.
        listing: FLOP while the page lists of a chunk's layer come to the host, which has to know
            them where pages or outputs move.
    """

    over_link: float
    hidden: float
    listing: float


# A GPU is taken to compute as fast beside its link as the fastest of ``oomb plan``'s list does
# (B200: 1,600 TFLOP/s at 55 GB/s; an H200 has 11,000 FLOP per byte). A CPU copies with the cores
# that compute. Lists cost two H200s 0.25 ms a layer and chunk (docs/lab/2026-11-28.md), in which
# attention computes 1.2e11 FLOP there, and as fast a GPU twice as many.
MACHINERY = {
    "cpu": Machinery(over_link=20.0, hidden=0.0, listing=0.0),
    "cuda": Machinery(over_link=30_000.0, hidden=0.5, listing=2.5e11),
}


@dataclass(frozen=True)
class Copying:
    """Copies of kept outputs, attention's and MLPs', beside those of a call's pages.

    An output that does not stay on the device is stored while its chunk is filled and loaded while
    it is swept. What the link carries of it while the same layer and chunk compute costs nothing:

        fill    compute  [ linear layers, attention of chunk c, layer l ][ … l+1
                store    [ own pages ][ output ]
        sweep   compute  [ linear layers (again) ][ backward of c, l ]
                load     [ past pages, their gradients ][ output ]

    In return the sweep's forward reads no past pages: where pages spill, their loads go.

    Attributes:
        linear_flops: per token of a layer, forward.
        missing: share of the pages that are not on the device when they are read.
    """

    demand: PageDemand
    linear_flops: float
    missing: float

    @property
    def lists(self) -> float:
        """FLOP while a call's page lists come to the host; 0: there are none, or pages spill, for
        which they come anyway."""
        sizes = self.demand.list_sizes
        if sizes is None or self.missing > 0:
            return 0.0
        chunks, layers, _ = sizes.of_call
        return self._machinery.listing * chunks * layers

    def least_worth(self, chunk: int, layer: int, flops: float, num_bytes: int) -> float:
        """FLOP that a byte of an output must save to be worth two trips over the link.

        Args:
            flops: of its attention's forward.
            num_bytes: of the output.
        """
        past = self._past_bytes(chunk, layer)
        to_store, to_load = self._carried(chunk, layer, flops)
        over_link = max(0.0, num_bytes - to_store) + max(0.0, num_bytes - past - to_load)
        return self._machinery.over_link * over_link / num_bytes

    def least_worth_of_mlp(
        self, chunk: int, layer: int, flops: float, num_bytes: int, beside: int
    ) -> float:
        """The same of a byte of the MLP's output; the sweep reads as many pages with it as without.

        Args:
            flops, beside: of the layer's attention, and bytes of its output, which goes first.
        """
        left = (max(0.0, carried - beside) for carried in self._carried(chunk, layer, flops))
        over_link = sum(max(0.0, num_bytes - carried) for carried in left)
        return self._machinery.over_link * over_link / num_bytes

    def _carried(self, chunk: int, layer: int, flops: float) -> tuple[float, float]:
        """Bytes that the link stores, and loads, behind a layer's computing beside its pages."""
        demand, machinery = self.demand, self._machinery
        begin, end = demand.chunks.span(chunk)
        linear = self.linear_flops * (end - begin) * demand.batch
        hidden = machinery.hidden / machinery.over_link
        layers = demand.layers
        first, last = layers.pages(layer, chunk)
        stored = last - first if layers.stores(layer) else 0
        own = self._spilled * stored * demand.batch * demand.layout.slot_bytes
        # Backward of the linear layers costs as much as their forward at least, where weights are
        # frozen; of attention 2.5 times as much. It loads keys, values and their gradients.
        past = (1 + demand.layout.grad_slots) * self._past_bytes(chunk, layer)
        return (
            max(0.0, hidden * (linear + flops) - own),
            max(0.0, hidden * (2 * linear + 2.5 * flops) - past),
        )

    @property
    def _machinery(self) -> Machinery:
        return MACHINERY[self.demand.device_type]

    @property
    def _spilled(self) -> int:
        return 1 if self.missing > 0 else 0

    def _past_bytes(self, chunk: int, layer: int) -> float:
        """Of a layer's past, what is not on the device when it is read."""
        demand = self.demand
        window = demand.shapes[layer].window
        chunks = demand.layers.chunks[layer]
        past = chunks.past_pages(chunk)
        if window:
            seen = float(past - first_page_in_window(chunks, chunk, window))
        else:
            seen = past * demand.chosen_share(past)
        return self.missing * seen * demand.batch * demand.layout.slot_bytes


def linear_flops(layers: Sequence[nn.Module], *, trained: bool = False) -> float:
    """FLOP of a layer's matrix products per token, forward, at least: experts are not counted.

    Args:
        trained: those of weights that are trained alone.
    """
    values = sum(
        parameter.numel()
        for layer in layers
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2 and "expert" not in name
        if parameter.requires_grad or not trained
    )
    return 2.0 * values / max(1, len(layers))
