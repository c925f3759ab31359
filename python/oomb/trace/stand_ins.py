"""Parts of the engine that cannot run without values, as they are on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from oomb.core.attention import ChunkAttention, like_tokens_first
from oomb.core.border_states import FillComplete
from oomb.core.chunk_run import ChunkRun
from oomb.core.latent_groups import expanded, gathered, half_of, propagated
from oomb.core.layer_attention import LayerAttention
from oomb.core.loop import ChunkLoop
from oomb.core.loss import ChunkLoss, slice_rows
from oomb.core.main_grad import MainGrads
from oomb.core.recompute import LayerRunner, Recompute
from oomb.core.rounded_sums import pieces_of
from oomb.model.interface import AttentionCall
from oomb.model.latent import Latent, latent_width
from oomb.model.layer_shape import LayerShape, kernel_head_dim
from oomb.parallel.group import Ranks
from oomb.parallel.heads import HeadShares
from oomb.parallel.heads_over_ranks import HeadsOverRanks
from oomb.parallel.placement import Placement
from oomb.trace.meter import Meter
from oomb.trace.setting import Setting


class TracedLoss(ChunkLoss):
    """Every token counts; slices are those of the device that is planned for."""

    device_type = "cpu"

    def _slice_rows(self, logit_bytes: int = 4) -> int:
        return slice_rows(self.device_type, self.vocab_size, logit_bytes)

    def _has_kernel(self) -> bool:
        return self.device_type == "cuda"

    def _softmax_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> torch.Tensor:
        logits.mul_(scale)
        return torch.empty(logits.shape[0], dtype=torch.float32)


class TracedMeter(Meter):
    """Sees to it that nothing with values is trained: its gradients would be without."""

    def _given(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        given = super()._given(args, kwargs)
        for tensor in given:
            if isinstance(tensor, FakeTensor):
                continue
            if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
                raise RuntimeError("a forward runs parameters that its module does not lead to")
        return given


class TracedSums(MainGrads):
    """Sums as the device that is planned for keeps them."""

    def __init__(self, device_type: str, meter: Meter, main_grad_dtype: str) -> None:
        super().__init__(main_grad_dtype)
        self._device_type = device_type
        self._meter = meter
        self._reached: set[nn.Parameter] = set()

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """A sum of every parameter, as an earlier chunk left it."""
        for parameter in parameters:
            super()._sum_of(parameter)

    def of(self, parameters: list[nn.Parameter], *, reached: bool) -> list[torch.Tensor]:
        """Sums of those that a chunk reached since :meth:`begin`, or of the others."""
        chosen = [p for p in parameters if (p in self._reached) is reached]
        return [self._sums[p] for p in chosen if p in self._sums]

    def _collect(self, parameter: Any) -> None:
        if parameter.grad is not None:
            self._reached.add(parameter)
        super()._collect(parameter)

    def _sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        self._reached.add(parameter)
        return super()._sum_of(parameter)

    def takes(self, weight: torch.Tensor) -> bool:
        known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return weight.dtype in known[: 4 if self._device_type == "cuda" else 2]

    def add_product(
        self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor, first: int = 0
    ) -> None:
        sums = self._sum_of(parameter)[first : first + left.shape[1]]
        self._meter.work.flops += 2 * left.shape[0] * sums.numel()
        if sums.dtype == torch.bfloat16:
            for begin, end in pieces_of(sums):
                piece = torch.empty((end - begin, *sums.shape[1:]), dtype=torch.float32)
                self._meter.work.moved_bytes += piece.numel() * piece.element_size()
                self._add_rounded(sums[begin:end], piece, 0)
                del piece
            return
        self._meter.work.moved_bytes += 2 * sums.numel() * sums.element_size()
        self._meter.work.operations += 1

    def add_rows(self, parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor) -> None:
        total = self._sum_of(parameter)
        added = values.to(torch.float32 if total.dtype == torch.bfloat16 else total.dtype)
        self._meter.work.moved_bytes += 4 * added.numel() * added.element_size()
        self._meter.work.operations += 1

    def _add_rounded(self, total: torch.Tensor, addend: torch.Tensor, seed: int) -> None:
        read = addend.numel() * addend.element_size()
        self._meter.work.moved_bytes += 2 * total.numel() * total.element_size() + read
        self._meter.work.operations += 1


class TracedRanks:
    """The ranks of a sequence, as their first one sees them: messages come empty."""

    rank = 0
    peers = sums = meanwhile = None

    def __init__(self, size: int) -> None:
        self.size = size

    def all_to_all(
        self, send: torch.Tensor, send_sizes: list[int], received_sizes: list[int], largest: int
    ) -> torch.Tensor:
        return send.new_empty(sum(received_sizes))

    def border(self) -> None:
        pass


def traced_placement(ranks: int) -> Placement:
    """Of a sequence that so many ranks share."""
    return Placement() if ranks == 1 else HeadsOverRanks(cast(Ranks, TracedRanks(ranks)))


class TracedRunner(LayerRunner):
    """Notes the peak until the backward of a layer is done; the meter's begins anew there.

    Attributes:
        peak_bytes: that peak; 0 where nothing is propagated past the layer.
    """

    def __init__(self, recompute: Recompute, meter: Meter, border: int) -> None:
        super().__init__(recompute=recompute, seed=None)
        self._meter, self._border = meter, border
        self.peak_bytes = 0

    def __call__(
        self,
        layer: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        if layer == self._border and args and args[0].requires_grad:
            args[0].register_hook(self._note)
        return super().__call__(layer, forward, args, keywords)

    def _note(self, _: torch.Tensor) -> None:
        self.peak_bytes, self._meter.peak_bytes = self._meter.peak_bytes, self._meter.live_bytes


class TracedLayerAttention(LayerAttention):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        attention = self._attention
        assert isinstance(attention, TracedAttention)
        attention.see(self._model.layer_of(call.module), call)
        return super().attend(call)

    def _attend_at_once(self, call: AttentionCall, layer: int) -> torch.Tensor:
        attention = self._attention
        assert isinstance(attention, TracedAttention)
        shares = self._placement.heads(call.q.shape[1], call.k.shape[1])
        carried = attention.carried(layer, call, shares)
        result = super()._attend_at_once(call, layer)
        del carried
        return result


class TracedLoop(ChunkLoop):
    _attends_by = TracedLayerAttention


class TracedAttention(ChunkAttention):
    """Takes what :class:`ChunkAttention` takes, and computes nothing."""

    def __init__(
        self,
        last_filled: int,
        setting: Setting,
        capability: int | None,
        meter: Meter,
        placement: Placement,
    ) -> None:
        pages = SimpleNamespace(check_finite=False, paired=False, choice=None)
        super().__init__(pages, placement, setting.head_groups)  # type: ignore[arg-type]
        self._last_filled = last_filled
        self.shapes: dict[int, LayerShape] = {}
        self._stored: dict[int, tuple[weakref.ref[torch.Tensor], ...]] = {}
        self.key_dtype = torch.float32
        self._in_waves, self._divides_pages = setting.waves, setting.divides_pages
        self._capability = capability
        self._expanded, self._meter = setting.expanded, meter

    def see(self, layer: int, call: AttentionCall) -> None:
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        head_dim = kernel_head_dim(call, self._capability)
        latent = latent_width(call.latent, call.k, call.v, has_values=False)
        shape = LayerShape(
            heads, kv_heads, head_dim, call.window, self._source(layer, call), latent=latent
        )
        self.shapes[layer] = shape
        self.key_dtype = call.k.dtype

    def _source(self, layer: int, call: AttentionCall) -> int | None:
        """The layer whose keys and values a call reads: they are the same tensors."""
        for earlier, (k, v) in self._stored.items():
            if earlier < layer and k() is call.k and v() is call.v:
                return earlier
        self._stored[layer] = weakref.ref(call.k), weakref.ref(call.v)
        return None

    def keeps(self, chunk: int, layer: int) -> bool:
        return False

    def holds_latents(self, layer: int) -> bool:
        return self._expanded is not None and self._shape(layer).latent > 0

    def _shape(self, layer: int) -> LayerShape:
        """Of the decoder's layer that a group of heads belongs to."""
        return self.shapes[layer // self.head_groups]

    def vector(
        self,
        layer: int,
        latent: Latent | None,
        dtype: torch.dtype,
        heads: tuple[int, int, int] | None = None,
    ) -> torch.Tensor | None:
        number = self._shape(layer).kv_heads
        if heads is None and self._expanded is not None and self._expanded.heads < number:
            heads = 0, self._expanded.heads, number  # of one rank, which runs all tokens
        return super().vector(layer, latent, dtype, heads)

    def begin(
        self,
        run: ChunkRun,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shares: HeadShares,
    ) -> None:
        if run.ends_with == "pages" and layer // self.head_groups == self._last_filled:
            raise FillComplete
        if self.holds_latents(layer):
            self._attend_in_scratch(layer, q)
        if self._is_divided(layer, shares):
            self._shares[layer] = shares
            self._attend_in_parts(layer, q)

    def _is_divided(self, layer: int, shares: HeadShares) -> bool:
        shape = self._shape(layer)
        divides = self._divides_pages and shares.copies > 1
        return divides and not shape.window and not self.holds_latents(layer)

    @property
    def numbered_shapes(self) -> list[LayerShape]:
        """Of the layers that attend, each source by its number among these."""
        layers = sorted(self.shapes)
        shapes = [self.shapes[layer] for layer in layers]
        return [
            s if s.source is None else replace(s, source=layers.index(s.source)) for s in shapes
        ]

    def carried(self, layer: int, call: AttentionCall, shares: HeadShares) -> list[torch.Tensor]:
        """Softmax state between launches, where its queries are a rank's own."""
        is_divided = self._is_divided(layer, shares)
        if is_divided or (not self._in_waves and not self.holds_latents(layer)):
            return []
        return _softmax_state(call.q)

    def backward(
        self,
        run: ChunkRun,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        d_o, d_lse, width = others[0], others[1], others[-1]
        with self._over_ranks(layer).backward(q, o, lse, d_o, d_lse, dq) as given:
            own = [torch.empty_like(given[2])]
            if self._in_waves or width:
                own.append(torch.empty(given[0].shape, dtype=lse.dtype))
        d_vector = self._d_vector(layer, k, lse.dtype, width) if width else None
        return dq, dk, dv, d_vector

    def _attend_in_parts(self, layer: int, q: torch.Tensor) -> None:
        """What the forward of a chunk holds at once where ranks divide its past."""
        o, lse = like_tokens_first(q), torch.empty(q.shape[:3], dtype=_state_dtype(q))
        with self._over_ranks(layer).forward(q, o, lse) as given:
            state = _softmax_state(given[0]) if self._in_waves else []
        del given, state

    def _attend_in_scratch(self, layer: int, q: torch.Tensor) -> None:
        """What the forward of a chunk holds at once beside its state."""
        assert self._expanded is not None
        o = like_tokens_first(q)
        scratch = self._expanded.scratch(q.shape[0], q, q.dtype)
        if self._expanded.at_once:
            vectors = self._gathered(layer, q)
            with self._meter.memory_alone():
                expanded(self._expansions[layer], self._of_group(vectors), q.shape[-1])
        del o, scratch

    def _d_vector(self, layer: int, k: torch.Tensor, wide: torch.dtype, width: int) -> torch.Tensor:
        """Gradient of what pages hold of a chunk. On the way what its backward holds at once."""
        known, (batch, _, tokens, _) = self._expanded, k.shape
        assert known is not None
        left = k.new_empty(2, batch, 1, tokens, width // 2)
        scratch = known.scratch(batch, k, k.dtype)
        d_scratch = known.scratch(batch, k, wide)
        if known.at_once:
            vectors = self._gathered(layer, k)
            d_pages = d_scratch.unflatten(0, (batch, -1))[:, : known.group]
            with self._meter.memory_alone():
                propagated(self._expansions[layer], self._of_group(vectors), d_pages, 1.0)
            del vectors
        del scratch, d_scratch
        return torch.cat(tuple(left), -1)

    def _gathered(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """Vectors of the past for which there is scratch."""
        known, expansion = self._expanded, self._expansions[layer]
        assert known is not None
        with self._meter.memory_alone():
            rows = like.new_empty(1, 2 * half_of(expansion, known.page_size))
            slots = torch.zeros(like.shape[0], known.at_once, dtype=torch.int32)
            return gathered(rows, slots, expansion, known.page_size)

    def _of_group(self, vectors: torch.Tensor) -> torch.Tensor:
        known = self._expanded
        assert known is not None
        return vectors[:, :, : known.group * known.page_size]


def _state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _softmax_state(q: torch.Tensor) -> list[torch.Tensor]:
    """Accumulator, maximum, sum."""
    shapes = (q.shape, q.shape[:3], q.shape[:3])
    return [torch.empty(shape, dtype=_state_dtype(q)) for shape in shapes]
