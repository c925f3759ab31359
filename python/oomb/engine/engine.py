"""The engine: one model, trained on sequences of any length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from oomb.config import AllChunks, Config, SampledChunks
from oomb.engine.attention import ChunkAttention
from oomb.engine.inputs import CallInputs, check_inputs
from oomb.engine.layout import Chunks
from oomb.engine.loop import ChunkLoop, OnProgress
from oomb.engine.loss import ChunkLoss, OnLogits
from oomb.engine.main_grad import MainGrads
from oomb.engine.plan import Plan, activation_bytes, gradient_bytes, plan_call
from oomb.engine.pools import Pools
from oomb.engine.recompute import LayerRunner
from oomb.engine.results import Stats, Step
from oomb.engine.tiers import PageLayout, free_memory
from oomb.errors import Error, UnsupportedModelError
from oomb.hf.interface import AttentionCall
from oomb.hf.model import CausalModel, check_places
from oomb.hf.probe import attention_shapes, check_against_stock
from oomb.hf.rope import (
    check_float64_angles,
    warn_of_far_positions,
    warn_of_unknown_positions,
)

_ACTIVATION_SHARE = (
    0.4  # of free memory that a chunk's activations may take before layers recompute
)


class Engine:
    """Trains a Hugging Face causal language model chunk by chunk, exactly (SeCO; OOMB).

    Args:
        model: a transformers causal language model, or one with peft adapters. It is not changed.
        config: settings; None: the defaults.

    Raises:
        UnsupportedModelError: the model cannot be run exactly; the text names the layer and reason.
    """

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        self.config = config if config is not None else Config()
        self._model = CausalModel(model)
        check_places(self._model.causal.named_parameters())
        self._shapes = attention_shapes(self._model)
        if self.config.rope_angles == "float64":
            check_float64_angles(self._model.decoder)
        self._grads = MainGrads()
        self._pools = Pools(self._model.device, self._shapes)
        self._recompute: bool | None = None
        self._step = 0
        self._closed = False
        self._warned_of_positions = False
        self._warned_of_unknown = True  # the probe's few tokens are nobody's
        self._seconds_per_shape: dict[tuple[int, int], float] = {}
        self._probe()
        self._warned_of_unknown = False

    # Calls ----------------------------------------------------------------------------------------

    def forward_backward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        on_progress: OnProgress | None = None,
    ) -> Step:
        """Loss, and its gradient added to ``param.grad`` of every parameter that requires it.

        Equals one ordinary forward and ``backward()`` of the model on the same arguments.

        Args:
            input_ids: [batch, tokens] int64.
            labels: [batch, tokens] int64, aligned with input_ids, shifted inside; -100 is ignored.
            attention_mask: [batch, tokens] of ones, then zeros (right padding only).
            position_ids: [batch or 1, tokens] int64. Where they do not go up by one and there is no
                mask, a new document starts.
            document_ids: [batch or 1, tokens] int64, contiguous: attention stays inside a document,
                and its first token is not a target.
            loss_weights: [batch, tokens] factor of each label's term.
            num_items_in_batch: divides the summed loss instead of the number of counted tokens.
            on_progress: called at every chunk border.

        Raises:
            ValueError: an argument does not fit, or nothing is trained; nothing was allocated.
            OutOfMemoryError: the pages do not fit both tiers.
        """
        inputs = self._checked(
            input_ids,
            labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            loss_weights=loss_weights,
            num_items_in_batch=num_items_in_batch,
        )
        chunks = self._chunks(inputs.tokens)
        rule = self.config.backward
        swept = self._drawn(rule, chunks.number)
        loss_factor = rule.loss_factor if isinstance(rule, SampledChunks) else 1.0
        parameters = [p for p in self._model.causal.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(
                "model: expected parameters that require gradients, got none (adapters of peft are "
                "loaded frozen unless is_trainable=True)"
            )
        if not swept:
            return self._empty_draw(inputs, parameters)
        with self._call(inputs, chunks, swept, on_progress, False) as (loop, loss, attention):
            with self._grads.collecting(parameters), loop.running():
                fill_seconds = loop.fill(swept[-1])
                sweep_seconds = loop.sweep(swept, loss_factor)
            step = self._result(inputs, loss, attention, fill_seconds, sweep_seconds)
        self._grads.commit(parameters, self.config.keep_main_grad, zeros=False)
        self._step += 1
        self._seconds_per_shape[inputs.num_given, inputs.batch] = fill_seconds + sweep_seconds
        return step

    def evaluate(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        on_progress: OnProgress | None = None,
        return_logprobs: bool = False,
        on_logits: OnLogits | None = None,
    ) -> Step:
        """Loss without gradient; arguments as in :meth:`forward_backward`. Draws nothing.

        Args:
            return_logprobs: give each counted token's log-probability in ``step.logprobs``.
            on_logits: called with a first token and logits [batch, tokens, vocabulary], slice by
                slice, so that they need never exist together. Then all tokens but padding behind
                every sequence are run, and none has to be a target.
        """
        inputs = self._checked(
            input_ids,
            labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            loss_weights=loss_weights,
            num_items_in_batch=num_items_in_batch,
            every_token=on_logits is not None,
        )
        chunks = self._chunks(inputs.tokens)
        with self._call(inputs, chunks, None, on_progress, return_logprobs) as (
            loop,
            loss,
            attention,
        ):
            with loop.running():
                seconds = loop.evaluate(on_logits)
            return self._result(inputs, loss, attention, seconds, 0.0)

    @property
    def layer_windows(self) -> list[int]:
        """Sliding window of each layer; 0: none."""
        return [shape.window for shape in self._shapes]

    # Around calls ---------------------------------------------------------------------------------

    def plan(self, num_tokens: int, batch_size: int = 1) -> Plan:
        """What ``forward_backward`` on such a batch takes, and whether it fits now."""
        for name, value in (("num_tokens", num_tokens), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int >= 1, got {value!r}")
        recompute = self._resolve_recompute(batch_size)
        layout = self._layout(self._key_dtype())
        plan = plan_call(
            self._model, self._shapes, layout, self.config, num_tokens, batch_size, recompute
        )
        seconds = self._seconds_per_shape.get((num_tokens, batch_size))
        return Plan(**{**vars(plan), "seconds": seconds})

    def main_grad(self, parameter: nn.Parameter) -> torch.Tensor:
        """The last call's gradient of a parameter, in fp32 (fp64 for fp64 models).

        Raises:
            ValueError: ``Config(keep_main_grad=True)`` is not set, or nothing reached it.
        """
        total = self._grads.get(parameter)
        if total is None:
            raise ValueError(
                "parameter: expected one that the last call reached, with "
                f"Config(keep_main_grad=True), got one of shape {tuple(parameter.shape)} without"
            )
        return total

    def snapshot(self) -> dict[str, Any]:
        """Where every page is: slots by state, residency per layer, copies in flight."""
        return self._pools.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw and round as this one would have."""
        seed = (
            self.config.backward.seed if isinstance(self.config.backward, SampledChunks) else None
        )
        return {"step": self._step, "sampling_seed": seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`.

        Raises:
            ValueError: the state belongs to another sampling seed.
        """
        own = self.state_dict()["sampling_seed"]
        if state.get("sampling_seed") != own:
            raise ValueError(
                f"state: expected sampling_seed {own}, got {state.get('sampling_seed')}"
            )
        self._step = int(state["step"])

    def close(self) -> None:
        """Give the pools back. The engine cannot be used afterwards; the model can."""
        self._pools.close()
        self._closed = True
        self._grads.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts of a call ------------------------------------------------------------------------------

    def _checked(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> CallInputs:
        if self._closed:
            raise Error("engine: expected an open engine, got one that was closed")
        inputs = check_inputs(
            input_ids,
            labels,
            vocab_size=self._model.vocab_size,
            device=self._model.device,
            **others,
        )
        if self.config.rope_angles == "model" and not self._warned_of_positions:
            self._warned_of_positions = warn_of_far_positions(inputs.largest_position)
        if not self._warned_of_unknown:
            config = self._model.causal.config
            self._warned_of_unknown = warn_of_unknown_positions(inputs.largest_position, config)
        return inputs

    def _chunks(self, tokens: int) -> Chunks:
        return Chunks(tokens, self.config.chunk_size, self.config.page_size)

    def _drawn(self, rule: AllChunks | SampledChunks, num_chunks: int) -> list[int]:
        drawn = list(rule.draw(num_chunks, self._step))
        if drawn != sorted(set(drawn)) or not all(0 <= chunk < num_chunks for chunk in drawn):
            raise ValueError(
                f"backward.draw: expected ascending chunks below {num_chunks}, got {drawn}"
            )
        return drawn

    @contextmanager
    def _call(
        self,
        inputs: CallInputs,
        chunks: Chunks,
        swept: list[int] | None,  # None: evaluate
        on_progress: OnProgress | None,
        return_logprobs: bool,
    ) -> Iterator[tuple[ChunkLoop, ChunkLoss, ChunkAttention]]:
        layout = self._layout(self._key_dtype())
        recompute = self._resolve_recompute(inputs.batch)
        loss = ChunkLoss.of_call(
            self._model.head,
            inputs,
            chunks.chunk_size,
            self._model.vocab_size,
            return_logprobs,
            None if swept is None else self._grads,
        )
        with ExitStack() as stack:
            seed = self._dropout_seed(stack)
            others = 0
            if swept is not None:
                others = activation_bytes(self._model, self.config, inputs.batch, recompute)
                others += gradient_bytes(self._model)
            pages = stack.enter_context(
                self._pools.call(
                    self.config, inputs, chunks, layout, swept, others, self._rounding_seed()
                )
            )
            attention = ChunkAttention(pages)
            runner = LayerRunner(recompute=recompute, seed=seed)
            yield (
                ChunkLoop(
                    self._model,
                    inputs,
                    chunks,
                    attention,
                    runner,
                    loss,
                    self.config.rope_angles,
                    on_progress,
                    None if swept is None else self._grads,
                ),
                loss,
                attention,
            )

    def _result(
        self,
        inputs: CallInputs,
        loss: ChunkLoss,
        attention: ChunkAttention,
        fill_seconds: float,
        sweep_seconds: float,
    ) -> Step:
        counters = attention.pages.manager.stats()
        reads = counters["hits"] + counters["misses"]
        selector = attention.pages.selector
        selection = []
        if self.config.record_selection and selector is not None:
            selection = selector.as_lists(attention.pages.chunks.number)
        dtype = torch.float64 if self._model.dtype == torch.float64 else torch.float32
        return Step(
            loss=loss.total.to(dtype),
            num_valid_tokens=inputs.num_valid,
            stats=Stats(
                fill_seconds=fill_seconds,
                sweep_seconds=sweep_seconds,
                device_peak_bytes=counters["device_peak_bytes"],
                host_peak_bytes=counters["host_peak_bytes"],
                h2d_bytes=counters["h2d_bytes"],
                d2h_bytes=counters["d2h_bytes"],
                exposed_copy_seconds=counters["exposed_copy_seconds"],
                hit_rate=counters["hits"] / reads if reads else 1.0,
            ),
            selection=selection,
            logprobs=loss.logprobs,
        )

    def _empty_draw(self, inputs: CallInputs, parameters: list[nn.Parameter]) -> Step:
        """No chunk was drawn: the estimate is 0, and zero is added to the gradients."""
        self._grads.clear()
        self._grads.commit(parameters, keep=False, zeros=True)
        self._step += 1
        dtype = torch.float64 if self._model.dtype == torch.float64 else torch.float32
        return Step(
            loss=torch.zeros((), dtype=dtype, device=self._model.device),
            num_valid_tokens=inputs.num_valid,
            stats=Stats(
                fill_seconds=0.0,
                sweep_seconds=0.0,
                device_peak_bytes=0,
                host_peak_bytes=0,
                h2d_bytes=0,
                d2h_bytes=0,
                exposed_copy_seconds=0.0,
                hit_rate=1.0,
            ),
        )

    def _layout(self, dtype: torch.dtype) -> PageLayout:
        first = self._shapes[0]
        return PageLayout.of(
            first.kv_heads, first.head_dim, self.config.page_size, dtype, self.config.kv_grad_dtype
        )

    def _key_dtype(self) -> torch.dtype:
        """Dtype that keys have under the caller's autocast state: that of the pages."""
        seen: list[torch.dtype] = []

        class Seen(Exception):
            pass

        def record(call: AttentionCall) -> torch.Tensor:
            seen.append(call.k.dtype)
            raise Seen

        ids = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        torch.clear_autocast_cache()
        try:
            session = self._model.session(record, largest_position=0, rope_angles="model")
            with torch.no_grad(), torch.random.fork_rng(devices=self._rng_devices()), session:
                self._model.hidden(ids, ids)
        except Seen:
            pass
        return seen[0]

    def _resolve_recompute(self, batch: int) -> bool:
        if self.config.recompute != "auto":
            return self.config.recompute == "layer"
        if self._recompute is None:
            kept = activation_bytes(self._model, self.config, batch, recompute=False)
            self._recompute = kept > _ACTIVATION_SHARE * free_memory(self._model.device)
        return self._recompute

    def _dropout_seed(self, stack: ExitStack) -> int | None:
        """One draw from torch's generator per call; layers derive theirs from it."""
        if not self._model.causal.training:
            return None
        seed = int(torch.randint(2**62, ()))
        stack.enter_context(torch.random.fork_rng(devices=self._rng_devices()))
        return seed

    def _rng_devices(self) -> list[torch.device]:
        return [self._model.device] if self._model.device.type == "cuda" else []

    def _rounding_seed(self) -> int:
        key = hashlib.blake2b(f"oomb rounding {self._step}".encode(), digest_size=8).digest()
        return int.from_bytes(key, "little")

    def _probe(self) -> None:
        """Compare three tiny chunks with the stock forward, before the first real call."""
        page = (
            self.config.page_size
            if self._model.device.type == "cuda"
            else min(16, self.config.page_size)
        )
        tokens = 3 * page

        def chunked_logits(ids: torch.Tensor) -> torch.Tensor:
            tiny = Config(
                chunk_size=page,
                page_size=page,
                rope_angles=self.config.rope_angles,
                recompute="none",
            )
            own, self.config = self.config, tiny
            try:
                return self._logits_of(ids)
            finally:
                self.config = own

        # Under the caller's autocast the two would differ by its rounding.
        with torch.autocast(self._model.device.type, enabled=False):
            try:
                check_against_stock(self._model, tokens, chunked_logits)
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise UnsupportedModelError(
                    f"{type(self._model.causal).__name__}: fails when it is run in chunks: {error}"
                ) from error
        self._pools.close()

    def _logits_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of one sequence, chunk by chunk; for the probe."""
        inputs = self._checked(
            ids,
            ids,
            attention_mask=None,
            position_ids=None,
            document_ids=None,
            loss_weights=None,
            num_items_in_batch=None,
        )
        collected: list[torch.Tensor] = []
        logits_of = self._model.head.logits

        chunks = self._chunks(ids.shape[1])
        inputs = _uncut(inputs, ids)
        with self._call(inputs, chunks, None, None, False) as (loop, _, _), loop.running():
            loop.hidden_states(lambda hidden: collected.append(logits_of(hidden[0])))
        return torch.cat(collected)


def _uncut(inputs: CallInputs, ids: torch.Tensor) -> CallInputs:
    """Inputs of all tokens, also those behind the last target."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return CallInputs(
        **{
            **vars(inputs),
            "input_ids": ids,
            "position_ids": positions,
            "targets": torch.full_like(ids, -100),
        }
    )
