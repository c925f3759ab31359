"""Attention of a decoder layer in a chunk: heads go to their ranks, attend there, and come back.

What is computed, and what the layer is given, over its heads in one group:

    queries, keys, values of own tokens ⇄ those of own heads ▸ pages ▸ output ⇄ output of own tokens
"""

from __future__ import annotations

from functools import partial

import torch

from oomb.core.alternation import Alternation
from oomb.core.attention import ChunkAttention
from oomb.core.attention_operation import chunk_attention, with_sinks
from oomb.core.border_states import FillComplete
from oomb.core.chunk_run import current_run
from oomb.core.head_groups import GroupOutputs, calls_of_groups
from oomb.core.images import ImageRows
from oomb.core.kept_outputs import ByTokens
from oomb.core.layout import Chunks
from oomb.core.recompute import LayerRunner
from oomb.model.causal import CausalModel
from oomb.model.interface import AttentionCall
from oomb.model.layer_shape import kernel_head_dim
from oomb.parallel.heads import HeadShares
from oomb.parallel.placement import Placement
from oomb.parallel.slices import TokenSlices


class LayerAttention:
    """In place of the attention of a model's layers.

    Attributes:
        turns: of two chunks of the fill; None: one chunk runs alone.
    """

    def __init__(
        self,
        model: CausalModel,
        chunks: Chunks,
        attention: ChunkAttention,
        runner: LayerRunner,
        images: ImageRows,
        placement: Placement,
    ) -> None:
        self._model = model
        self._chunks = chunks
        self._attention = attention
        self._runner = runner
        self._images = images
        self._placement = placement
        self.turns: Alternation | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        groups = self._attention.head_groups
        layer = self._model.paged[self._model.layer_of(call.module)]
        if groups == 1:
            return self._attend_at_once(call, layer)
        outputs, ends = GroupOutputs(call.q.shape[1]), False
        for group, own in enumerate(calls_of_groups(call, groups)):
            try:
                outputs.put(group, self._attend_at_once(own, layer * groups + group))
            except FillComplete:  # of this group; the others' pages are written too
                ends = True
        if ends:
            raise FillComplete
        return outputs.whole

    def _attend_at_once(self, call: AttentionCall, layer: int) -> torch.Tensor:
        """
        Args:
            layer: of the pages.
        """
        shares = self._placement.heads(call.q.shape[1], call.k.shape[1])
        by_tokens = self._by_tokens(call, layer, shares)
        if by_tokens is None:
            o = self._to_tokens(
                _cut(self._attend_here(call, layer, shares), call.v.shape[-1]), shares
            )
        elif current_run().phase == "fill":
            o = self._attend_here(call, layer, shares, by_tokens)
        else:
            o = self._attend_as_before(call, layer, shares, by_tokens)
        return o.to(call.q.dtype)

    def _by_tokens(self, call: AttentionCall, layer: int, shares: HeadShares) -> ByTokens | None:
        """How a layer's output is kept, where it is and no rank needs that of other tokens: then
        the sweep sends nothing forwards. None: as it is computed."""
        slices, attention = self._slices, self._attention
        tokens = slices.end - slices.begin
        if self._placement.ranks == 1 or not attention.keeps(current_run().chunk, layer):
            return None
        # Each rank's share of the tokens is as large as its share of the heads.
        divide = shares.copies == 1 and tokens % self._placement.ranks == 0
        dims = {call.k.shape[-1], call.v.shape[-1], kernel_head_dim(call, self._model.capability)}
        later = self._images.seen_both_ways(call, call.q, call.k, call.v)
        if not divide or len(dims) > 1 or later is not None or call.sinks is not None:
            return None
        if attention.holds_latents(layer):
            return None
        send = partial(self._to_tokens, shares=shares)
        return ByTokens(shares.queries, tokens, send)

    def _attend_as_before(
        self, call: AttentionCall, layer: int, shares: HeadShares, by_tokens: ByTokens
    ) -> torch.Tensor:
        """In the sweep, the output that the fill has kept of the tokens that run here."""
        attention, run, slices = self._attention, current_run(), self._slices
        numbers = call.scale, call.softcap, self._model.window_of(call)
        q, k, v = (x.to(call.k.dtype) for x in (call.q, call.k, call.v))

        def backward(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            o: torch.Tensor,
            lse: torch.Tensor,
            d_o: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            return attention.backward(run, layer, q, k, v, o, lse, d_o, None, *numbers, 0)[:3]

        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            attention.begin(run, layer, q, k, v, shares)
            o, lse = attention.forward(run, layer, q, k, v, *numbers, by_tokens)
            return self._placement.known_output((q, k, v, o, lse), backward, slices, shares)

        return self._runner.attention(attend, q, k, v)[0]

    def _attend_here(
        self,
        call: AttentionCall,
        layer: int,
        shares: HeadShares,
        by_tokens: ByTokens | None = None,
    ) -> torch.Tensor:
        """Output of the heads that are held here, of the whole chunk; or of all heads and own
        tokens, where it is kept so. In the fill nothing else is left of them."""
        window = self._model.window_of(call)
        dtype = call.k.dtype  # the pages' own; a model may leave V in another
        # Zeros behind the shorter head dim (latent attention has 192 beside 128) change no product.
        widest = max(call.k.shape[-1], call.v.shape[-1])
        own = tuple(_padded(x.to(dtype), widest) for x in (call.q, call.k, call.v))
        width = kernel_head_dim(call, self._model.capability)
        q, k, v = (_padded(x, width) for x in self._to_heads(own, shares))
        vector = self._vector(layer, call, dtype, shares)
        stored_k, stored_v = (k, v) if vector is None else vector.detach().chunk(2, -1)

        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            # Where a fill ends nothing is passed on: this chunk may be here before the one it sees.
            turns, run, attention = self.turns, current_run(), self._attention
            while turns is not None and attention.pages.early(layer, run.chunk):
                self._let_the_other_run(turns)
            attention.begin(run, layer, q, stored_k, stored_v, shares)
            if turns is not None:
                self._let_the_other_run(turns)
            if by_tokens is not None:
                numbers = call.scale, call.softcap, window
                return attention.forward(run, layer, q, k, v, *numbers, by_tokens)
            o, lse = chunk_attention(
                q, k, v, vector, call.scale, call.softcap, window, attention.id, layer
            )
            return o, lse

        o, lse = self._runner.attention(attend, q, k, v)
        later = self._images.seen_both_ways(call, q, k, v)
        if later is not None:
            o, lse = later(o, lse)
        if call.sinks is not None:
            o = with_sinks(o, lse, self._placement.of_heads(call.sinks, shares))
        return o

    def _to_heads(
        self, own: tuple[torch.Tensor, ...], shares: HeadShares
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of the heads that are held here, of the whole chunk."""
        placement = self._placement
        if placement.ranks == 1:
            return own
        slices = self._slices
        return self._runner.once(lambda: placement.to_heads(own, slices, shares), *own)

    def _vector(
        self, layer: int, call: AttentionCall, dtype: torch.dtype, shares: HeadShares
    ) -> torch.Tensor | None:
        """What pages hold in place of keys and values, of the whole chunk; None: these.

        Each rank holds all of it. The gradient that its heads leave there is a part, and summed
        over ranks on the way back.
        """
        placement = self._placement
        if placement.ranks == 1:
            return self._attention.vector(layer, call.latent, dtype)
        heads = *shares.keys_of(placement.rank), shares.kv_heads
        own = self._attention.vector(layer, call.latent, dtype, heads)
        if own is None:
            return None
        slices, tokens_first = self._slices, own[:, 0]
        (whole,) = self._runner.once(
            lambda: (placement.to_whole(tokens_first, slices),), tokens_first
        )
        return whole[:, None]

    def _to_tokens(self, o: torch.Tensor, shares: HeadShares) -> torch.Tensor:
        """Attention's output of the tokens that are run here."""
        placement = self._placement
        if placement.ranks == 1:
            return o
        slices = self._slices
        return self._runner.once(lambda: (placement.to_tokens(o, slices, shares),), o)[0]

    def _let_the_other_run(self, turns: Alternation) -> None:
        """The other chunk computes while this one's lists and pages are on their way."""
        random_state = self._runner.random_state()
        turns.pass_on()
        self._runner.restore_random_state(random_state)

    @property
    def _slices(self) -> TokenSlices:
        """Who runs which tokens of the chunk."""
        return self._placement.slices(*self._chunks.span(current_run().chunk))


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _cut(o: torch.Tensor, width: int) -> torch.Tensor:
    """The first of each head's features, tokens first in memory."""
    if o.shape[-1] == width:
        return o
    return o[..., :width].transpose(1, 2).contiguous().transpose(1, 2)
