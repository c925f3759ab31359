"""Makes the calls of an engine, and tells before what one will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from oomb.config import Config
from oomb.core.attention import ChunkAttention
from oomb.core.border_states import BorderStates, border_bytes
from oomb.core.call_pages import seed_of_call
from oomb.core.early_sums import EarlySums
from oomb.core.inputs import CallInputs
from oomb.core.keeping import MlpOutput
from oomb.core.latent_groups import Expanded
from oomb.core.later_products import LaterProducts
from oomb.core.layout import Chunks, GradientReach
from oomb.core.loop import ChunkLoop, OnProgress
from oomb.core.loss import ChunkLoss, TokenLoss
from oomb.core.main_grad import MainGrads
from oomb.core.mlp_outputs import PagedMlpOutputs
from oomb.core.page_demand import Demand, PageDemand, rule_of
from oomb.core.page_lists import PageLists
from oomb.core.pools import Pools
from oomb.core.recompute import LayerRunner, Recompute, most_of, seed_of_rank
from oomb.core.router_loss import RouterLoss
from oomb.core.stopwatch import Stopwatch
from oomb.core.tiers import PageLayout, free_memory
from oomb.core.weight_copies import WeightCopies
from oomb.engine.call import Call
from oomb.engine.mlp_outputs import alike, mlp_outputs, paged_mlps
from oomb.engine.needs import activation_bytes, counted_tokens, needs_of, recompute_of, tower_of
from oomb.engine.plan import Plan, plan_call
from oomb.engine.ranks import spans_here, tokens_here
from oomb.engine.surroundings import on_device, surroundings
from oomb.model.causal import CausalModel
from oomb.model.generators import kept_generators
from oomb.model.last_product import LastProduct, kept_products
from oomb.model.layer_shape import LayerShape
from oomb.model.mixers import state_bytes
from oomb.model.probe import key_dtype
from oomb.model.swap import Swaps
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights


class Calls:
    """Makes the calls of an engine.

    Args:
        pools: keep for the next call what can be kept.
        grads: take the gradients of a call.

    Attributes:
        placement, weights: where the parts of a sequence are, and weights.
        measured: by tokens and batch: seconds, and those that kept outputs spared.
    """

    def __init__(
        self,
        model: CausalModel,
        shapes: list[LayerShape],
        pools: Pools,
        grads: MainGrads,
        placement: Placement,
        weights: Weights,
    ) -> None:
        self.placement = placement
        self.weights = weights
        self._model = model
        self._shapes = shapes
        self._pools = pools
        self._grads = grads
        self._products: LaterProducts | None = None  # of the last call
        self._recompute: dict[tuple[int, int, Expanded | None], Recompute] = {}
        # Of the last call: a plan cannot look, where weights are sharded.
        self._key_dtype = key_dtype(model) if weights.is_sharded else torch.float32
        self.measured: dict[tuple[int, int], tuple[float, float]] = {}

    @contextmanager
    def under_way(
        self,
        config: Config,
        inputs: CallInputs,
        swept: list[int] | None,
        *,
        step: int = 0,
        on_progress: OnProgress | None = None,
        return_logprobs: bool = False,
        token_loss: TokenLoss | None = None,
        token_metrics: bool = False,
    ) -> Iterator[Call]:
        """A call, and its pages while it lasts.

        Args:
            swept: chunks that receive gradient, ascending; None: evaluate.
            step: number of the call, for the rounding of gradient pages.

        Raises:
            OutOfMemoryError: the pages do not fit both tiers, or torch found no memory within.
        """
        model = self._model
        model.expect_logits("model")
        with Swaps() as swaps, self._pools.told_of_errors():
            swaps.also(surroundings(model))
            self.gather(swaps, sums=True)
            loss = ChunkLoss.of_call(
                model.head,
                inputs,
                spans_here(inputs.chunks(config), self.placement),
                model.vocab_size,
                return_logprobs,
                None if swept is None else self._grads,
                token_loss,
                token_metrics,
            )
            seed = self.dropout_seed(swaps)
            yield self.begin(swaps, config, inputs, swept, loss, seed, step, on_progress)

    def gather(self, swaps: Swaps, *, sums: bool = False) -> None:
        """Weights of which ranks have shards are there when a module runs.

        Args:
            sums: shards of a layer's sums may be made as soon as a backward is done with it.
        """
        self.weights.gather(swaps.afterwards, self._on_layer_done if sums else None)

    def _on_layer_done(self, parameters: list[nn.Parameter]) -> None:
        if self._products is not None:
            self._products.finish()
        self._grads.scatter(self.weights, parameters)

    def begin(
        self,
        swaps: Swaps,
        config: Config,
        inputs: CallInputs,
        swept: list[int] | None,
        loss: ChunkLoss,
        seed: int | None,
        step: int,
        on_progress: OnProgress | None,
        *,
        every_output: bool = False,
        lists: PageLists | None = None,
    ) -> Call:
        """A call whose pages die with ``swaps``; arguments as of :meth:`under_way`, and others.

        Args:
            seed: of :meth:`dropout_seed`.
            every_output, lists: as of :class:`oomb.core.page_demand.Demand`.
        """
        model = self._model
        weight_copies = WeightCopies(model)
        placement = self.placement
        chunks, state = inputs.chunks(config), state_bytes(model.mixers)
        products = self._last_products() if swept is not None else []
        mlps = self._mlps(products, inputs.batch, chunks.chunk_size)
        if swept is not None:
            mlps = alike(placement.collect(lambda: mlps))
        handed = 0 if swept is None else border_bytes(state, inputs.batch, chunks.number)
        demand = Demand.of(
            config,
            self._shapes,
            self.layout(config, alike=inputs.own_chunks is not None),
            inputs,
            swept,
            every_output=every_output or model.routers is not None,
            mlps=mlps,
            lists=lists,
            border_bytes=handed,
            chained=bool(model.mixers),
            fills_all=model.ends_in_mixer,
            ranks=placement.ranks,
        )
        tokens = self._counted(config, inputs.tokens)
        recompute: Recompute = "none"
        if swept is not None:
            recompute = most_of(placement.collect(lambda: self.recompute(config, demand, tokens)))
        images = inputs.images
        shown = 0 if images is None or images.propagate is None else len(images.rows)
        needs = needs_of(
            model, config, demand, tokens, recompute, self.weights, begun=True, image_tokens=shown
        )
        pages = self._pools.call(swaps, demand, needs, seed_of_call(step))
        attention = ChunkAttention(pages, placement, self._shapes[0].groups)
        borders = BorderStates(model.mixers, inputs, demand.chunks, swept is not None)
        routers, levels = model.routers, pages.outputs.levels or recompute
        self._products = watch = None
        if swept is not None:
            self._products = LaterProducts(self._grads)
            swaps.also(self._products.beside(placement))
            if placement.ranks > 1 and not self.weights.is_sharded:
                adding = self._grads, self._products, placement
                watch = EarlySums(*adding, model.layers, model.causal, swept[0]).watch
        kept = PagedMlpOutputs(pages, paged_mlps(model.paged, self._shapes[0].groups))
        loop = ChunkLoop(
            model,
            inputs,
            demand.chunks,
            attention,
            LayerRunner(recompute=levels, seed=seed, gpus=model.rng_devices(), watch=watch),
            loss,
            config.rope_angles,
            on_progress,
            self._products,
            borders,
            placement,
            None if routers is None else RouterLoss(routers, inputs, demand.chunks, placement),
            kept_products(products, kept),
        )
        exchanges = Stopwatch()
        placement.measure_with(exchanges)
        here = (placement, self.weights, exchanges, weight_copies, recompute)
        return Call(model, config, inputs, loop, loss, attention, borders, *here)

    def _last_products(self) -> list[LastProduct | None]:
        """Of each layer, whose outputs the fill can keep; sharded weights are not here to see."""
        kind = self._model.device.type
        if self.weights.is_sharded or torch.is_autocast_enabled(kind):
            return []
        return self._model.last_products(self._grads)

    def _mlps(
        self, products: list[LastProduct | None], batch: int, chunk_size: int
    ) -> tuple[MlpOutput | None, ...]:
        return mlp_outputs(
            [None if product is None else product.shape for product in products],
            self._model.paged,
            self._shapes,
            batch=batch,
            chunk_size=chunk_size,
            ranks=self.placement.ranks,
            recurrent=bool(self._model.mixers),
        )

    def layout(self, config: Config, *, alike: bool = False) -> PageLayout:
        """Pages as the caller's autocast state has them.

        Args:
            alike: pages of all layers hold ``page_size`` tokens.
        """
        with on_device(self._model):
            self._key_dtype = key_dtype(self._model)
        return self._layout_of(config, alike)

    def _layout_of(self, config: Config, alike: bool) -> PageLayout:
        return PageLayout.of_layers(
            self._shapes,
            config.page_size,
            config.chunk_size,
            self._key_dtype,
            config.kv_grad_dtype,
            chooses=rule_of(config) is not None,
            alike=alike,
        )

    def recompute(self, config: Config, demand: PageDemand, tokens: int) -> Recompute:
        """What backward computes again; ``"auto"`` is decided once for chunks of a size, and of a
        past's latents.

        Args:
            tokens: of a chunk, as of :func:`counted_tokens`.
        """
        if config.recompute != "auto":
            return config.recompute
        key = demand.batch, tokens, demand.expanded
        if key not in self._recompute:
            activations = partial(activation_bytes, self._model, config, demand, tokens)
            free = free_memory(self._model.device)
            self._recompute[key] = recompute_of(config, activations, free)
        return self._recompute[key]

    def plan(
        self, config: Config, num_tokens: int, batch: int, image_tokens: int, swept: Sequence[int]
    ) -> Plan:
        """What a call on ``batch`` sequences of ``num_tokens`` tokens will take.

        Args:
            image_tokens: of each sequence, that show images.
            swept: chunks that it draws.
        """
        with Swaps() as swaps:
            self.weights.begin(swaps.afterwards)
            return self._plan(config, num_tokens, batch, batch * image_tokens, swept)

    def planned_chunks(self, config: Config, num_tokens: int) -> Chunks:
        """Of a text all of whose tokens are targets: the last predicts nothing, but is routed."""
        unused = 1 if self._model.routers is None else 0
        return Chunks.of(config, max(1, num_tokens - unused))

    def _plan(
        self, config: Config, num_tokens: int, batch: int, shown: int, swept: Sequence[int]
    ) -> Plan:
        chunks = self.planned_chunks(config, num_tokens)
        tokens = self._counted(config, chunks.tokens)
        asks = not self.weights.is_sharded  # whose layers are not here
        layout = self.layout(config) if asks else self._layout_of(config, alike=False)
        demand = PageDemand(
            chunks=chunks,
            reach=GradientReach.of(config.backward, swept),
            shapes=self._shapes,
            layout=layout,
            batch=batch,
            device_type=self._model.device.type,
            selection=rule_of(config),
            every_output=self._model.routers is not None,
            mlps=self._mlps(self._last_products(), batch, chunks.chunk_size),
            border_bytes=border_bytes(state_bytes(self._model.mixers), batch, chunks.number),
            ranks=self.placement.ranks,
        )
        recompute = self.recompute(config, demand, tokens)
        of_call = self._model, config, demand, tokens, recompute, self.weights
        needs = needs_of(*of_call, begun=False, exact=True, image_tokens=shown)
        plan = plan_call(self._model, config, self._pools, demand, needs, recompute)
        if shown:
            plan = plan.with_tower(
                tower_of(self._model, config, demand, shown), free_memory(self._model.device)
            )
        seconds, spared = self.measured.get((num_tokens, batch), (None, None))
        return replace(plan, seconds=seconds, kept_output_seconds=spared)

    def _counted(self, config: Config, tokens: int) -> int:
        longest, recurrent = counted_tokens(config, tokens), bool(self._model.mixers)
        return tokens_here(longest, self.placement.ranks, recurrent=recurrent)

    def dropout_seed(self, swaps: Swaps) -> int | None:
        """One draw from torch's generator per call; layers derive theirs from it."""
        if not any(self._model.modes):
            return None
        seed = seed_of_rank(int(torch.randint(2**62, ())), self.placement.rank)
        self.keep_generators(swaps)
        return seed

    def keep_generators(self, swaps: Swaps) -> None:
        """torch's generators go on from where they are, though layers seed them."""
        if any(self._model.modes):
            swaps.also(kept_generators(self._model.rng_devices()))
