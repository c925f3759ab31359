"""The load-balancing loss of a mixture of experts, over the chunks of one call.

L = c · E · Σ_e f_e · P_e, where f_e, the share of choices that fell on expert e, passes no gradient
and P_e is a mean of probabilities (:mod:`oomb.model.routers`; Fedus et al., Switch Transformers,
equations 4 to 6). Both are means over the tokens of all layers and chunks. So f is complete
when the fill is, if that runs every chunk and layer to its end, and from then on the loss is a sum
over tokens again: the gradient of each probability p_e is c · E · f_e / rows, a constant.

    fill   chunk 0: count  chunk 1: count  …  last chunk: count    f is known, and so is L
    sweep  last chunk: c·E·f/rows to its router logits, beside the loss's gradient   …

Ranks that share a sequence count the tokens that each runs; sums of counts are the whole one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oomb.core.chunk_run import ChunkRun, current_run
from oomb.core.inputs import CallInputs
from oomb.core.layout import Chunks
from oomb.errors import UnsupportedModelError
from oomb.model.routers import Routers, counted
from oomb.parallel.placement import Placement


class RouterLoss:
    """That of one call. A chunk hands on its router logits, as roots of its backward.

    Args:
        placement: which tokens of a chunk are run here.
    """

    def __init__(
        self, routers: Routers, inputs: CallInputs, chunks: Chunks, placement: Placement
    ) -> None:
        device = inputs.input_ids.device
        self._routers = routers
        self._chunks, self._placement = chunks, placement
        self._batch = inputs.batch
        self._num_keys = inputs.num_keys
        self._chosen = torch.zeros(routers.experts, dtype=torch.float64, device=device)
        self._probabilities = torch.zeros_like(self._chosen)
        self._rows = torch.zeros((), dtype=torch.float64, device=device)
        self._slopes: torch.Tensor | None = None  # of each expert's probability
        self._taken: tuple[torch.Tensor, ...] = ()

    def take(self, logits: tuple[torch.Tensor, ...]) -> None:
        """Router logits of the current chunk: [tokens, experts] of each router."""
        run = current_run()
        if len(logits) != self._routers.number:
            raise UnsupportedModelError(
                f"router logits: expected {self._routers.number} tensors of the decoder, as many "
                f"as of the whole model, got {len(logits)}"
            )
        if run.phase == "sweep":
            self._taken = logits
            return
        mask = self._mask(run.chunk)
        for of_router in logits:
            chosen, probabilities = counted(of_router, self._routers.best, mask)
            self._chosen += chosen
            self._probabilities += probabilities
            self._rows += of_router.shape[0] if mask is None else mask.sum()

    def total(self) -> torch.Tensor:
        """This rank's share of the loss, 0-d fp64, when the fill has run every chunk.

        Sweeps may begin then.
        """
        counts = self._placement.total(torch.cat([self._chosen, self._rows[None]]))
        chosen, rows = counts[:-1], counts[-1]
        self._slopes = self._routers.coefficient * self._routers.experts * chosen / rows**2
        return (self._slopes * self._probabilities).sum()

    @contextmanager
    def on(self, run: ChunkRun) -> Iterator[None]:
        """Around a chunk's run, and in the sweep around its backward."""
        try:
            yield
        finally:
            self._taken = ()

    @torch.no_grad()
    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Router logits of this chunk that reach what is trained, and their gradients."""
        assert self._slopes is not None
        mask = self._mask(current_run().chunk)
        roots = [x for x in self._taken if x.requires_grad]
        return roots, [self._gradient(x, mask) for x in roots]

    def _gradient(self, logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Of Σ slopes · softmax(logits) over the tokens that count."""
        assert self._slopes is not None
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        slopes = self._slopes.to(wide)
        p = logits.softmax(-1, dtype=wide)
        gradient = p * (slopes - (p @ slopes)[:, None])
        if mask is not None:
            gradient *= mask[:, None]
        return gradient.to(logits.dtype)

    def _mask(self, chunk: int) -> torch.Tensor | None:
        """[batch · tokens] bool: tokens run here that are no padding; None: all."""
        slices = self._placement.slices(*self._chunks.span(chunk))
        if self._num_keys is None and slices.run == slices.own:
            return None
        (begin, end), (first, last) = slices.run, slices.own
        positions = torch.arange(begin, end, device=self._rows.device)
        counts = ((positions >= first) & (positions < last)).expand(self._batch, -1)
        if self._num_keys is not None:
            counts = counts & (positions < self._num_keys[:, None])
        return counts.flatten()
