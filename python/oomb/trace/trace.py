"""One chunk's step on tensors without memory: what torch will hold, and what will be computed.

The engine's own loop, loss, recompute and gradient sums run on fake tensors, so any architecture is
counted as it is. Only attention's kernels and the page pools are left out; they have no torch code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomb.core.copying import linear_flops
from oomb.core.host_sums import own_parameters
from oomb.core.inputs import CallInputs
from oomb.core.later_products import LaterProducts
from oomb.core.layout import Chunks
from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.host_weights import block_bytes, movable_weights
from oomb.model.last_product import last_products
from oomb.model.layer_shape import LayerShape
from oomb.model.mixers import state_bytes
from oomb.model.probe import found_mixers
from oomb.model.swap import entered
from oomb.trace.autocast import autocast_of_device, autocast_state
from oomb.trace.bare import shapes_only
from oomb.trace.copied import copied_model
from oomb.trace.experts import experts_of_any_dtype
from oomb.trace.fused import ProductsOfShapes, fused_on_shapes, rotate_on_shapes
from oomb.trace.meter import Work
from oomb.trace.quantized import PackedLinear, unpack_as_shapes
from oomb.trace.recurrences import kernels_in_torch, recurrences_on_shapes
from oomb.trace.samples import sample_sizes
from oomb.trace.setting import Setting
from oomb.trace.stand_ins import (
    TracedAttention,
    TracedLoop,
    TracedLoss,
    TracedMeter,
    TracedRunner,
    TracedSums,
    traced_placement,
)
from oomb.trace.tower import Tower

_TRACED = 2  # chunks: the first one is traced, and there is one behind it
# What a forward raises that looks at values, or was made from a config that fits no model.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
_FLOPS_PER_BYTE = {"cuda": 200.0, "cpu": 8.0}  # matrix products beside memory, about


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A chunk of a model, counted; attention's own work left out.

    Attributes:
        fill_peak_bytes: what torch holds beyond parameters while a chunk is filled.
        sweep_peak_bytes: the same while a chunk is swept, with the sums of gradients over chunks.
        sum_bytes: those sums.
        fill, sweep: work on one chunk.
    """

    fill_peak_bytes: int
    sweep_peak_bytes: int
    sum_bytes: int
    fill: Work
    sweep: Work


class Tracer:
    """Traces chunks of one model; every setting once, with autocast and without.

    Args:
        model: with or without weights; it is not touched.
        device_type: ``"cuda"`` or ``"cpu"``: slices of the loss differ.
        fused: norms and gates run as single kernels (Liger), as the engine does on a GPU.
        capability: of the GPU, 90 for 9.0; None: a CPU.

    Raises:
        UnsupportedModelError: the model cannot be traced; the text says where it failed.

    Attributes:
        shapes: attention of each layer that has it.
        state_bytes: of recurrences and convolutions, for one sequence at a border between chunks.
        key_dtype: of keys and values, so of the pages.
        dtype: of the embedding.
        vocab_size, hidden_size: of the model.
        parameter_bytes: all parameters and buffers.
        gradient_bytes: gradients of the trainable parameters, in their own dtype.
        trainable: trainable parameters, without values.
        embeddings: those of them that embed tokens.
        trained_layers: of each layer those that are its own alone.
        largest_product: (in, out) sizes of the largest matrix of a layer.
        last_products: shapes, as of :func:`oomb.model.last_product.last_products`; ``paged``: as of
            :class:`CausalModel`.
        linear_flops: of a layer's matrix products per token, forward, at least.
        trained_flops: of those whose weights are trained.
        parameters: all, without values, and those of each decoder layer as ``layers``.
        tower: of a model that sees images.
        movable_bytes: of each layer, frozen weights that the host could keep.
    """

    def __init__(
        self, model: nn.Module, device_type: str, fused: bool, capability: int | None = None
    ) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._bare = shapes_only(model, self._mode)
        with self._mode:
            unpack_as_shapes(self._bare, model)
        # Parameters without memory are of another type.
        given = CausalModel(model)
        self._head_is_plain = given.head.plain_weight() is not None
        adapters = ProductsOfShapes() if device_type == "cuda" else None
        products = last_products(given.layers, _takes(device_type), adapters)
        self.last_products = [None if one is None else one.shape for one in products]
        self._device_type = device_type
        self.tower = Tower(self._bare, self._mode, device_type)
        self._fused, self._capability = fused, capability
        self._traces: dict[tuple[Setting, bool, torch.dtype], Trace] = {}
        self._failures: dict[tuple[Setting, bool, torch.dtype], str] = {}
        causal = CausalModel(self._bare)
        with suppress(AttributeError, ValueError):  # most models have no experts
            causal.causal.set_experts_implementation("grouped_mm")  # others look at values
        own = [*causal.causal.parameters(), *causal.causal.buffers()]
        config: Any = causal.decoder.config
        self.parameters = list(causal.causal.parameters())
        self.layers = [list(layer.parameters()) for layer in causal.layers]
        self.trainable = [p for p in self.parameters if p.requires_grad]
        embeddings = [m for m in causal.causal.modules() if isinstance(m, nn.Embedding)]
        self.embeddings = frozenset(p for m in embeddings for p in m.parameters())
        self.parameter_bytes = _bytes(own)
        self.gradient_bytes = _bytes(self.trainable)
        self.dtype = causal.dtype
        self.vocab_size, self.hidden_size = causal.vocab_size, int(config.hidden_size)
        self.largest_product = _largest_product(causal.layers[0])
        self.linear_flops = linear_flops(list(causal.layers))
        self.trained_flops = linear_flops(list(causal.layers), trained=True)
        self.trained_layers = own_parameters(causal.layers)
        self.movable_bytes = tuple(block_bytes(movable_weights(causal.layers)))
        self.shapes: list[LayerShape] = []
        seen = self._run(causal, Setting(1, 1, "none", False), sweeps=False)[1]
        if not seen.shapes:
            raise UnsupportedModelError(
                f"{type(causal.causal).__name__}: no layer calls attention through transformers' "
                "interface"
            )
        self.shapes = _with_blocks(seen.numbered_shapes, sorted(seen.shapes), config)
        self._num_layers = len(causal.layers)
        self.key_dtype = seen.key_dtype
        self.paged = {layer: number for number, layer in enumerate(sorted(seen.shapes))}
        self.state_bytes = self._states(causal)
        self._samples = sample_sizes(causal)

    def _states(self, causal: CausalModel) -> int:
        """What one sequence hands over a border beside keys and values."""
        runnable = experts_of_any_dtype(), kernels_in_torch(causal.decoder)
        with entered(torch.random.fork_rng(devices=[]), *runnable, self._mode):
            try:
                return state_bytes(found_mixers(causal))
            except (UnsupportedModelError, *_FAILURES):  # it knows no cache like ours
                return 0

    def trace(self, setting: Setting) -> Trace:
        """The full model's chunk; of many like layers a few are run."""
        key = setting, *autocast_state(self._device_type)
        if key in self._failures:
            raise UnsupportedModelError(self._failures[key])
        if key not in self._traces:
            try:
                self._traces[key] = self._of(setting)
            except UnsupportedModelError as error:
                self._failures[key] = str(error)
                raise
        return self._traces[key]

    def _of(self, setting: Setting) -> Trace:
        if self._samples is None:
            return self._run(CausalModel(self._bare), setting)[0]
        return self._sampled(*self._samples, setting)

    def _sampled(self, few: int, more: int, setting: Setting) -> Trace:
        """From runs of the first layers alone.

        The last of them run where all others have kept what they keep: that peak grows with the
        number of layers. What comes behind, to the embedding's gradient, has sums alone to grow by.
        """
        own, steps = more - few, (self._num_layers - more) / (more - few)
        a, b = (self._run(self._shortened(k), setting, border=k - own) for k in (few, more))
        sums = _grown(a[0].sum_bytes, b[0].sum_bytes, steps) - b[0].sum_bytes
        peak = max(_grown(a[2][0], b[2][0], steps), b[2][1] + sums)
        return replace(_extended(a[0], b[0], steps), sweep_peak_bytes=peak)

    def _last_filled(self, causal: CausalModel) -> int:
        """Layer where a fill ends: those behind it read keys and values of earlier ones."""
        shapes, last = self.shapes, len(causal.layers) - 1
        if len(shapes) != len(causal.layers):
            return last
        return max(layer for layer, shape in enumerate(shapes) if shape.source is None)

    def _plain_weight(self, causal: CausalModel) -> nn.Parameter | None:
        if not self._head_is_plain:
            return None
        weight: nn.Parameter = causal.causal.get_output_embeddings().weight
        return weight

    def _shortened(self, num_layers: int) -> CausalModel:
        """The same model with its first layers only; tensors are shared."""
        memo = {id(t): t for t in (*self._bare.parameters(), *self._bare.buffers())}
        short = copied_model(self._bare, memo)
        decoder = CausalModel(short).decoder
        name = _layer_list(decoder)
        setattr(decoder, name, getattr(decoder, name)[:num_layers])
        config: Any = decoder.config
        for kinds in ("layers_block_type", "layer_types"):
            if isinstance(getattr(config, kinds, None), list):
                setattr(config, kinds, getattr(config, kinds)[:num_layers])
        config.num_hidden_layers = num_layers
        return CausalModel(short)

    def _run(
        self, causal: CausalModel, setting: Setting, sweeps: bool = True, border: int = -1
    ) -> tuple[Trace, TracedAttention, tuple[int, int]]:
        """The chunk, its attention, and the sweep's peaks until layer ``border`` is done and on."""
        causal.capability = self._capability
        if self._fused:
            causal._fused = fused_on_shapes(causal.decoder)
            causal._rotation = rotate_on_shapes
        if self._device_type == "cuda" or causal._products is not None:
            causal._products = ProductsOfShapes()
        parameters = [p for p in causal.causal.parameters() if p.requires_grad]
        of_chunk = setting.tokens * setting.ranks
        chunks = Chunks(_TRACED * of_chunk, of_chunk, of_chunk)
        placement = traced_placement(setting.ranks)
        with entered(self._mode):
            inputs = _fake_inputs(setting.batch, chunks.tokens)
            total = torch.zeros((), dtype=torch.float64)
        meter, sweep = TracedMeter(_FLOPS_PER_BYTE[self._device_type]), Work()
        attention = TracedAttention(
            self._last_filled(causal), setting, self._capability, meter, placement
        )
        grads = TracedSums(self._device_type, meter, setting.main_grad_dtype)
        runner = TracedRunner(setting.recompute, meter, border)
        loss = TracedLoss(
            head=causal.head,
            inputs=inputs,
            vocab_size=causal.vocab_size,
            total=total,
            logprobs=None,
            counted={
                begin: setting.batch * (end - begin) * causal.head.gives_logits
                for begin, end in (placement.slices(*span).own for span in chunks.spans)
            },
            weight=self._plain_weight(causal),
            sums=grads,
        )
        loss.device_type = self._device_type
        products = LaterProducts(grads)
        loop = TracedLoop(
            causal,
            inputs,
            chunks,
            attention,
            runner,
            loss,
            "model",
            None,
            products,
            placement=placement,
        )
        with entered(
            torch.random.fork_rng(devices=[]),
            experts_of_any_dtype(),
            recurrences_on_shapes(causal.decoder),
            autocast_of_device(self._device_type),
            self._mode,
            grads.collecting(parameters),
            products.beside(placement),
            meter,
            loop.running(),
        ):
            try:
                with meter.stretch() as fill:
                    loop.fill(1)
                fill_peak = meter.peak_bytes
                if sweeps:
                    if placement.ranks > 1:  # which products wait shows in a call's first chunk
                        loop.sweep([0], 1.0)
                        runner.peak_bytes = 0
                    grads.begin(parameters)
                    with meter.stretch() as sweep:
                        loop.sweep([0], 1.0)
            except UnsupportedModelError:  # cannot be run either
                raise
            except _FAILURES as error:
                raise UnsupportedModelError(
                    f"{type(causal.causal).__name__}: cannot be planned without running it: {error}"
                ) from error
            sums, unreached = (grads.of(parameters, reached=r) for r in (True, False))
            last = meter.peak_bytes - _bytes(unreached)
            peaks = runner.peak_bytes - _bytes(unreached) if runner.peak_bytes else last, last
            trace = Trace(
                fill_peak_bytes=fill_peak,
                sweep_peak_bytes=max(peaks),
                sum_bytes=_bytes(sums),
                fill=fill,
                sweep=sweep,
            )
        return trace, attention, peaks


def _takes(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Weights whose products a device adds to their sums."""
    own = (torch.float32, torch.float64)
    return lambda weight: device_type == "cuda" or weight.dtype in own


def _with_blocks(
    shapes: Sequence[LayerShape], layers: Sequence[int], config: Any
) -> list[LayerShape]:
    """Blocks of tokens (Llama 4) stand in masks alone, which a trace does not make.

    Args:
        layers: of the decoder, that ``shapes`` belong to.
    """
    size, kinds = (
        getattr(config, "attention_chunk_size", None),
        getattr(config, "layer_types", None),
    )
    if not size or not kinds:
        return list(shapes)
    return [
        replace(shape, window=size, block=size) if kinds[layer] == "chunked_attention" else shape
        for shape, layer in zip(shapes, layers, strict=True)
    ]


def _largest_product(layer: nn.Module) -> tuple[int, int]:
    """(in, out) sizes of a layer's largest matrix."""
    sizes = [(p.shape[1], p.shape[0]) for p in layer.parameters() if p.ndim == 2]
    packed = [m for m in layer.modules() if isinstance(m, PackedLinear)]
    if packed:  # their parameters are bytes without a shape
        sizes = [(m.in_features, m.out_features) for m in packed]
    return max(sizes, key=lambda size: size[0] * size[1])


def _layer_list(decoder: nn.Module) -> str:
    number = decoder.config.num_hidden_layers  # type: ignore[union-attr]
    return next(
        name
        for name, module in decoder.named_children()
        if isinstance(module, nn.ModuleList) and len(module) == number
    )


def _grown(a: float, b: float, steps: float) -> int:
    return round(b + steps * (b - a))


def _extended(few: Trace, more: Trace, steps: float) -> Trace:
    """The trace where ``steps`` times as many layers come as ``more`` has beyond ``few``."""

    def work(a: Work, b: Work) -> Work:
        pairs = zip(vars(a).values(), vars(b).values(), strict=True)
        return Work(*(_grown(x, y, steps) for x, y in pairs))

    return Trace(
        fill_peak_bytes=_grown(few.fill_peak_bytes, more.fill_peak_bytes, steps),
        sweep_peak_bytes=_grown(few.sweep_peak_bytes, more.sweep_peak_bytes, steps),
        sum_bytes=_grown(few.sum_bytes, more.sum_bytes, steps),
        fill=work(few.fill, more.fill),
        sweep=work(few.sweep, more.sweep),
    )


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _fake_inputs(batch: int, tokens: int) -> CallInputs:
    ids = torch.empty(batch, tokens, dtype=torch.int64)
    return CallInputs(
        input_ids=ids,
        position_ids=ids,
        targets=ids,
        weights=None,
        first_key=None,
        num_keys=None,
        num_valid=batch * tokens,
        divisor=1.0,
        largest_position=tokens,
        num_given=tokens,
    )
