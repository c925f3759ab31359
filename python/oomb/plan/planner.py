"""Predicts training steps of one model on one machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oomb.config import Config, SampledChunks
from oomb.core.border_states import border_bytes
from oomb.core.fit import Room, fit
from oomb.core.growth import growth_seconds
from oomb.core.layout import Chunks, GradientReach
from oomb.core.main_grad import check_sums
from oomb.core.page_demand import Choices, rule_of
from oomb.core.recompute import Recompute, levels_below
from oomb.core.tiers import PageLayout
from oomb.engine.needs import (
    activations_of,
    counted_tokens,
    gradient_bytes,
    may_vary,
    others_of,
    recompute_of,
    setting_of,
    spare_of,
)
from oomb.engine.plan import check_planned
from oomb.engine.ranks import shapes_here, tokens_here
from oomb.errors import OutOfMemoryError
from oomb.model.float8 import GPU_WANTED, SMALLEST_CAPABILITY
from oomb.plan.duration import Duration, duration_of
from oomb.plan.exchange import exchange_seconds
from oomb.plan.host_sums import HostSumsUse, with_sums
from oomb.plan.host_weights import HostWeightsUse, with_weights
from oomb.plan.images import ImagesUse
from oomb.plan.levels import mean_trace
from oomb.plan.machine import Machine
from oomb.plan.optimizers import OptimizerUse, optimizer_use
from oomb.plan.pages import PageCall, mlps_of
from oomb.plan.pools import least_pools, pool_use
from oomb.plan.prediction import Prediction
from oomb.plan.rates import Rates, datasheet_rates, measured_rates
from oomb.plan.sharded_weights import ShardedWeightsUse
from oomb.trace.bare import bare_model
from oomb.trace.trace import Trace, Tracer

_DRAWS = 8  # draws of SampledChunks that are looked at; the largest counts
_ARGUMENT_BYTES = 3 * 8  # per token: ids, labels and a mask, at most
_INPUT_BYTES = _ARGUMENT_BYTES + 2 * 4  # and positions, targets


class Planner:
    """What is learnt about the model is kept, so that many settings can be asked about.

    Args:
        model: a model (with or without weights), a transformers config, a folder, a name on the
            hub, or a name of ``oomb.trace.shapes.SHAPES``.
        machine: None: this one.
        dtype: of the parameters, where the model is given by name or config; None: the config's.
        adapter: a ``peft.PeftConfig`` to train instead of the model's own parameters.
        quantization: ``"nf4"``, ``"fp4"`` or ``"int8"``: the base in 4 or 8 bits under the
            adapter.
        float8: linear layers of torchao's recipe ``rowwise_with_gw_hp``, where the model is given
            by name or config.
        images: with the tower that sees them, where the model is given by name or config.

    Raises:
        ValueError: no such model.
        UnsupportedModelError: the model cannot be planned without running it.
    """

    def __init__(
        self,
        model: Any,
        machine: Machine | None = None,
        *,
        dtype: torch.dtype | None = None,
        adapter: Any = None,
        quantization: str | None = None,
        float8: bool = False,
        images: bool = False,
    ) -> None:
        self.machine = Machine.here() if machine is None else machine
        ranks, capability = self.machine.ranks, self.machine.capability
        if float8 and capability is not None and capability < SMALLEST_CAPABILITY:
            raise ValueError(
                f"float8: expected {GPU_WANTED}, got compute capability {capability / 10}"
            )
        made: dict[str, Any] = {"dtype": dtype, "adapter": adapter, "quantization": quantization}
        bare = bare_model(model, float8=float8, images=images, **made)
        self.tracer = Tracer(
            bare, self.machine.device_type, self.machine.fused, self.machine.capability
        )
        self.shapes = shapes_here(self.tracer.shapes, ranks, Config())

    def predict(
        self,
        num_tokens: int,
        config: Config | None = None,
        *,
        batch_size: int = 1,
        optimizer: str | None = "adamw_torch_fused",
        optimizer_states: str = "device",
        accumulates: bool = False,
        reference: bool = False,
        image_tokens: int = 0,
        timed: bool = True,
        dry_run: bool = True,
        step: int | None = None,
        choices: Choices | None = None,
    ) -> Prediction:
        """One step on ``batch_size`` sequences of ``num_tokens`` tokens, after the first.

        Args:
            config: settings of the engine; None: the defaults.
            optimizer: as the stock trainer's ``optim``; None: forward and backward alone.
            optimizer_states: ``"device"``, or ``"host"``: see :class:`oomb.optim.HostStates`.
            accumulates: gradients of earlier calls are kept while a call runs.
            reference: a frozen copy of the model lies beside it, whole or shared as it is (DPO,
                KTO, GRPO without adapters).
            image_tokens: of each sequence, that show images.
            timed: predict seconds too; on this machine that measures for about a second.
            dry_run: where pages move between the tiers, run the page manager on the call to see
                the host tier's peak and the copies; False: the least that the host tier must hold.
            choices: what page-sparse attention is taken to choose; None: the defaults of
                :class:`Choices`.
            step: number of the call whose draw of ``SampledChunks`` is meant; None: of the first
                eight the one with the most pages.

        Raises:
            ValueError: an argument does not fit.
        """
        check_planned(num_tokens, batch_size)
        config, tracer = config or Config(), self.tracer
        check_sums(tracer.trainable, config.main_grad_dtype)
        use = OptimizerUse()
        if optimizer is not None:
            use = optimizer_use(
                optimizer, tracer.trainable, optimizer_states, embeddings=tracer.embeddings
            )
        shards = ShardedWeightsUse.of(tracer, config, self.machine)
        gradients = tracer.gradient_bytes
        if shards is not None:
            use, gradients = shards.optimizer(use), shards.own_gradients(gradients)
        kept = use.device_bytes + (gradients if accumulates else 0)
        weights = HostWeightsUse.of(config, tracer.movable_bytes)
        sums = HostSumsUse.of(config, tracer, self.machine)
        if shards is not None:
            shards = replace(shards, sum_bytes=shards.sum_bytes - sums.spared_bytes)
        parameters = tracer.parameter_bytes - weights.host_bytes + weights.device_bytes
        gathered = 0
        if shards is not None:
            parameters, gathered = shards.parameter_bytes, shards.gathered_bytes
        of_reference = parameters if reference else 0
        free = self.machine.device_bytes - parameters - of_reference - kept
        if self.machine.device_type == "cpu":  # one memory for both
            of_optimizer = use.host_bytes if optimizer_states == "host" else 0
            free -= weights.host_bytes + sums.host_bytes + of_optimizer
        call = self.pages(num_tokens, config, batch_size, step, choices)
        images = ImagesUse.of(tracer, config, call, image_tokens)
        free -= call.batch * call.chunks.tokens * _ARGUMENT_BYTES + images.tower.pixel_bytes
        recompute = self._recompute(config, call, free - gathered)

        shortage, spills = "", False
        room = self._room(
            config, call, recompute, free, use, weights, sums, shards, images, accumulates
        )
        try:
            found = fit(call, config.keep_outputs, room, linear_flops=tracer.linear_flops)
            call = replace(call, outputs=found.outputs)
            spills = found.caps.host_slots > 0
            pools = pool_use(call, found.caps, dry_run=dry_run)
        except OutOfMemoryError as error:
            shortage = str(error)
            pools = least_pools(call, room.device // call.layout.slot_bytes)
        traced = partial(self._trace, config, call, waves=spills or shortage != "")
        outputs = call.outputs or call.nothing_kept
        trace, chunks = traced(recompute), outputs.chunks_at(call.swept, recompute)
        duration: Duration | None = None
        stepping: float | None = None
        growing: float | None = None
        if timed:
            rates = self._rates(config, call)
            if rates is not None:
                mean = mean_trace(chunks, traced)
                stepping = use.seconds(rates, on_cpu=self.machine.device_type == "cpu")
                duration = duration_of(
                    call,
                    mean,
                    pools,
                    rates,
                    again=chunks.get("layer", 0) / max(1, len(call.swept)),
                    exchange=exchange_seconds(
                        call, mean, self.machine, rates, tracer.trained_flops, shards
                    ),
                    images=images.seconds(rates),
                )
                duration = with_weights(duration, call, mean, rates, weights)
                duration = with_sums(duration, call, mean, rates, sums)
                pinned = pools.host_peak_bytes if self.machine.device_type == "cuda" else 0
                growing = growth_seconds(pinned, duration.fill)
        return Prediction(
            num_tokens=num_tokens,
            batch_size=batch_size,
            config=replace(config, recompute=recompute),
            machine=self.machine,
            optimizer=optimizer,
            parameter_bytes=parameters,
            reference_bytes=of_reference,
            weight_host_bytes=weights.host_bytes,
            # Sharded ones stay on the devices.
            movable_bytes=0 if shards else sum(tracer.movable_bytes) - weights.host_bytes,
            sum_bytes=shards.sum_bytes if shards else trace.sum_bytes - sums.spared_bytes,
            sum_host_bytes=sums.host_bytes,
            optimizer_bytes=use.device_bytes,
            optimizer_host_bytes=use.host_bytes,
            optimizer_states=optimizer_states,
            optimizer_seconds=stepping,
            growth_seconds=growing,
            kept_gradient_bytes=gradients if accumulates else 0,
            call_bytes=_call_bytes(call, trace, sums.spared_bytes, shards, images),
            image_bytes=images.before_bytes(_input_bytes(call, images) + gathered),
            image_host_bytes=images.host_bytes,
            gathered_bytes=gathered,
            step_bytes=gradients + use.step_bytes,
            device_pool_bytes=pools.device_peak_bytes,
            host_pool_bytes=pools.host_peak_bytes,
            list_bytes=call.list_bytes,
            border_bytes=call.border_bytes,
            **outputs.stats(call.swept, recompute),
            h2d_bytes=pools.h2d_bytes,
            d2h_bytes=pools.d2h_bytes,
            duration=duration,
            shortage=shortage,
        )

    def pages(
        self,
        num_tokens: int,
        config: Config,
        batch_size: int,
        step: int | None = None,
        choices: Choices | None = None,
    ) -> PageCall:
        """The pages of a call with labels on every token, of which the last predicts nothing."""
        chunks = Chunks(max(1, num_tokens - 1), config.chunk_size, config.page_size)
        shapes = shapes_here(self.tracer.shapes, self.machine.ranks, config)
        return PageCall(
            chunks=chunks,
            reach=GradientReach.of(config.backward, _swept(config, chunks.number, step)),
            shapes=tuple(shapes),
            layout=PageLayout.of_layers(
                shapes,
                config.page_size,
                config.chunk_size,
                self.tracer.key_dtype,
                config.kv_grad_dtype,
                chooses=rule_of(config) is not None,
            ),
            batch=batch_size,
            device_type=self.machine.device_type,
            selection=rule_of(config),
            mlps=mlps_of(self.tracer, self.machine, config, shapes, batch_size),
            choices=choices or Choices(),
            border_bytes=border_bytes(self.tracer.state_bytes, batch_size, chunks.number),
            ranks=self.machine.ranks,
        )

    # Parts ----------------------------------------------------------------------------------------

    def _trace(self, config: Config, call: PageCall, recompute: Recompute, *, waves: bool) -> Trace:
        tokens = self._here(min(call.chunks.chunk_size, call.chunks.tokens))
        return self._traced(config, call, tokens, recompute, waves)

    def _traced(
        self, config: Config, call: PageCall, tokens: int, recompute: Recompute, waves: bool
    ) -> Trace:
        recurrent = self.tracer.state_bytes > 0
        setting = setting_of(config, call, tokens, recompute, waves=waves, recurrent=recurrent)
        return self.tracer.trace(setting)

    def _here(self, tokens: int) -> int:
        recurrent = self.tracer.state_bytes > 0
        return tokens_here(tokens, self.machine.ranks, recurrent=recurrent)

    def _recompute(self, config: Config, call: PageCall, free: int) -> Recompute:
        return recompute_of(config, partial(self._activations, config, call), free)

    def _activations(self, config: Config, call: PageCall, recompute: Recompute) -> int:
        """Of a chunk, as the engine counts them."""
        tokens = self._here(counted_tokens(config, call.chunks.tokens))
        return activations_of(self._traced(config, call, tokens, recompute, waves=True))

    def _room(
        self,
        config: Config,
        call: PageCall,
        recompute: Recompute,
        free: int,
        use: OptimizerUse,
        weights: HostWeightsUse,
        sums: HostSumsUse,
        shards: ShardedWeightsUse | None,
        images: ImagesUse,
        accumulates: bool,
    ) -> Room:
        """Memory that the call may have, as the engine will find it.

        Args:
            free: of the device, beside arguments and what stays there between calls.
        """
        assert not isinstance(config.device_memory, str)
        assert not isinstance(config.host_memory, str)
        cap, machine = config.host_memory, self.machine
        gradients = gradient_bytes(self.tracer.trainable, config) - sums.spared_bytes
        own, spare = self.tracer.gradient_bytes, spare_of(self.tracer.trainable)
        if shards is not None:
            gradients = shards.sum_bytes + shards.gathered_bytes
            own, spare = shards.own_gradients(own), spare // shards.ranks
        on_cpu = machine.device_type == "cpu"
        kept = own if accumulates else 0
        activations = partial(self._activations, config, call)
        varies = shards is None and may_vary(config, call, recompute)
        of_less = [activations(level) for level in levels_below(recompute)] if varies else []
        of_chunk = activations(recompute)
        return Room(
            one_memory=on_cpu,
            device_free=free,
            host_free=free if on_cpu else machine.host_bytes,
            device_cap=config.device_memory,
            host_cap=None if cap is None else max(1, cap // machine.neighbours),
            others=others_of(call, of_chunk, gradients, images.tower),
            activations=(*of_less, of_chunk) if varies else (),
            host_others=call.list_bytes
            + call.border_bytes
            + use.host_bytes
            + images.host_bytes
            + (0 if on_cpu else weights.host_bytes + sums.host_bytes),
            host_spare=spare,
            stepping=own + use.step_bytes - kept,
        )

    def _rates(self, config: Config, call: PageCall) -> Rates | None:
        machine, tracer = self.machine, self.tracer
        rows = min(call.chunks.chunk_size, call.chunks.tokens)
        if not machine.local:
            if machine.gpu is None:
                return None
            return datasheet_rates(machine.gpu, self.shapes[0], call.selection, rows * call.batch)
        outer, inner = tracer.largest_product
        return measured_rates(
            machine,
            shape=self.shapes[0],
            layout=call.layout,
            hidden=outer,
            inner=inner,
            dtype=tracer.dtype,
            chunk=rows,
            batch=call.batch,
            selection=call.selection,
        )


def _call_bytes(
    call: PageCall, trace: Trace, spared: int, shards: ShardedWeightsUse | None, images: ImagesUse
) -> int:
    """The most that a call takes of torch's memory beside its pages, with its arguments.

    Mean keys are there until the sweep has begun; the sums of gradients grow with it, but for
    ``spared`` bytes of those that the host keeps. The tower of images has its own after it.
    """
    lists = 0 if call.list_sizes is None else call.list_sizes.chunk_bytes
    loose = 0 if call.outputs is None else call.outputs.loose_bytes
    fill = trace.fill_peak_bytes + call.choosing_bytes
    gathered, sums, after = 0, trace.sum_bytes - spared, images.tower.after_bytes
    if shards is not None:
        gathered, sums = shards.gathered_bytes, shards.sum_bytes
        after -= min(after, images.tower.sum_bytes)  # among those of the rank
    sweep = trace.sweep_peak_bytes - trace.sum_bytes + sums
    of_chunks = lists + images.chunk_bytes + max(fill, sweep) + loose
    most = max(of_chunks, sums + after if after else 0)
    return _input_bytes(call, images) + gathered + most


def _input_bytes(call: PageCall, images: ImagesUse) -> int:
    return call.batch * call.chunks.tokens * _INPUT_BYTES + images.tower.pixel_bytes


def _swept(config: Config, num_chunks: int, step: int | None) -> tuple[int, ...]:
    """Chunks that are swept; without a step, of several draws the one with the most pages."""
    rule = config.backward
    if not isinstance(rule, SampledChunks):
        return tuple(range(num_chunks))
    steps = range(_DRAWS) if step is None else [step]
    draws = [tuple(rule.draw(num_chunks, step)) for step in steps]
    return max(draws, key=lambda drawn: (drawn[-1] + 2 * len(drawn)) if drawn else 0) or (0,)
