"""The engine: one model, trained on sequences of any length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oomb.config import Config
from oomb.core.border_states import expect_every_chunk
from oomb.core.host_sums import HostSums, host_sums_of
from oomb.core.inputs import CallInputs, check_callable, expect, kind_of
from oomb.core.loop import OnProgress
from oomb.core.loss import OnLogits, TokenLoss
from oomb.core.main_grad import MainGrads
from oomb.core.pools import Pools
from oomb.engine.admission import Admission, admitted
from oomb.engine.calls import Calls
from oomb.engine.plan import Plan, check_planned
from oomb.engine.ranks import gathering, shapes_here
from oomb.engine.surroundings import on_device
from oomb.engine.training import Training
from oomb.engine.two_pass import TwoPass
from oomb.engine.wanted import Wanted
from oomb.errors import Error
from oomb.model import one_call
from oomb.model.rope import check_float64_angles
from oomb.model.structure import checked_shapes
from oomb.model.swap import Swaps, as_before_afterwards
from oomb.parallel.mesh import placement_of, weights_of
from oomb.results import Stats, Step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Engine:
    """Trains a Hugging Face causal language model chunk by chunk, exactly (SeCO; OOMB).

    Args:
        model: a transformers causal language model, or one with peft adapters. It is patched for
            the length of a call; afterwards it is as it was.
        config: settings, the same on any number of ranks; None: the defaults, which are exact.
        mesh: ranks that share each sequence: a DeviceMesh with the dimension ``"cp"``, one GPU a
            rank, the same model on each. Every rank makes the same calls with the same whole batch,
            and gets the whole loss and gradient. None: this process alone.

    Looks at the model in a few short forwards: do its tokens meet in attention alone, and is that
    the attention which the engine computes?

    Raises:
        UnsupportedModelError: the model cannot be run exactly; the text names the layer and reason.
        ValueError: no model, no :class:`oomb.Config`, a mesh that does not fit, or sums in bf16
            for a model that trains no parameter in bf16.
    """

    def __init__(
        self, model: nn.Module, config: Config | None = None, *, mesh: DeviceMesh | None = None
    ) -> None:
        self.config = config if config is not None else Config()
        expect(isinstance(self.config, Config), "config", "an oomb.Config(…)", kind_of(self.config))
        self._placement = placement_of(mesh)
        self._weights = weights_of(model, self.config.sharded_weights, self._placement)
        self._model = self._placement.together(partial(admitted, model, self.config, self._weights))
        self._placement.expect_device(self._model.device)
        host = self._placement.together(self._host_sums)
        self._grads = MainGrads(self.config.main_grad_dtype, host)
        self._pools = Pools(self._model.device, self._placement)
        self._training = Training(self._model, self.config, self._grads)
        over = self._placement, self._weights
        self._admission = Admission(self._training, *over)
        as_before_afterwards(partial(gathering, *over, self._check_model))

    def _host_sums(self) -> HostSums | None:
        model, (placement, weights) = self._model, (self._placement, self._weights)
        return host_sums_of(model.layers, self.config, model.device, placement, weights)

    def _check_model(self) -> None:
        with Swaps() as swaps:
            swaps.also(on_device(self._model))
            self._weights.gather(swaps.afterwards)
            shapes, over = checked_shapes(self._model), (self._placement, self._weights)
            self._shapes = shapes_here(shapes, self._placement.ranks, self.config)
            if self.config.rope_angles == "float64":
                check_float64_angles(self._model.decoder)
            expect_every_chunk(self._model.mixers, self.config)
            self._calls = Calls(self._model, self._shapes, self._pools, self._grads, *over)

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
        token_loss: TokenLoss | None = None,
        token_metrics: bool = False,
        on_progress: OnProgress | None = None,
        **images: torch.Tensor | None,
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
            num_items_in_batch: divides the summed loss instead of the number of counted tokens; for
                accumulation over calls, the targets of all of them.
            token_loss: a term for each row, in place of the cross-entropy: a function of logits
                [n, vocabulary] (fp32 at least) and :class:`oomb.TokenRows`, slices of the counted
                tokens. What else it takes must be constant.
            token_metrics: give ``step.metrics``.
            on_progress: gets an :class:`oomb.Progress` at every chunk border; may end the call.
            images: what the model's own forward takes for images and videos (``pixel_values``,
                ``image_grid_thw``, ``mm_token_type_ids``, ``token_type_ids``, …), as a processor
                gives it. ``position_ids`` may then be [3 or 4, batch, tokens].

        All tensors are on the model's device.

        Returns:
            Step: ``loss``, ``num_valid_tokens``, ``stats`` and, where recorded, ``selection``.

        Raises:
            ValueError: an argument does not fit, or nothing is trained; nothing was allocated.
            OutOfMemoryError: the pages do not fit both tiers, or torch got no memory.
            UnsupportedModelError: attention dropout in training mode.
            Error: the engine is closed, runs already, belongs to the process that this one was
                forked from, or is inside ``torch.inference_mode()``; with ``check_finite`` a value
                that is not finite.

        After any of them gradients are as they were, and the next call works.
        """
        training, config, weights = self._training, self.config, self._weights
        given = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
            "loss_weights": loss_weights,
            "num_items_in_batch": num_items_in_batch,
        }

        def prepare() -> tuple[CallInputs, list[int], list[nn.Parameter]]:
            inputs = self._admission.checked(input_ids, labels, images=images, **given)
            check_callable("on_progress", on_progress)
            check_callable("token_loss", token_loss)
            if torch.is_inference_mode_enabled():
                raise Error("forward_backward: expected no torch.inference_mode(), got one")
            swept = training.drawn(inputs.chunks(config).number)
            return inputs, swept, training.parameters()

        inputs, swept, parameters = self._admission.together(prepare, images)
        has_loss = token_loss is not None
        wanted = {"token_loss": has_loss, "token_metrics": token_metrics, "backward.draw": swept}
        self._admission.expect_alike(images, input_ids=input_ids, labels=labels, **given, **wanted)
        if not swept:
            training.add_zeros(parameters)
            zero = torch.zeros((), dtype=self._model.loss_dtype, device=self._model.device)
            return Step(loss=zero, num_valid_tokens=inputs.num_valid, stats=Stats())

        def run() -> Step:
            with self._placement.call(), Swaps() as swaps:
                self._grads.clear()  # sums that were kept; the call's room is counted without them
                with self._calls.under_way(
                    config,
                    inputs,
                    swept,
                    step=training.number,
                    on_progress=on_progress,
                    token_loss=token_loss,
                    token_metrics=token_metrics,
                ) as call:
                    swaps.afterwards(training.settled())
                    with training.collecting(weights.plain(parameters)), call.loop.running():
                        fill_seconds = call.loop.fill(swept[-1])
                        sweep_seconds = call.loop.sweep(swept, training.loss_factor)
                    step = call.result(fill_seconds, sweep_seconds)
                self._grads.sum_over(self._placement, weights, parameters)
                step = call.with_exchanges(step)
                keep = config.keep_main_grad
                self._placement.settle(partial(self._grads.commit, parameters, keep, zeros=False))
                seconds = fill_seconds + sweep_seconds
                spared = step.stats.kept_output_seconds
                self._calls.measured[inputs.num_given, inputs.batch] = seconds, spared
                return step

        return as_before_afterwards(run)

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
        token_metrics: bool = False,
        on_logits: OnLogits | None = None,
        **images: torch.Tensor | None,
    ) -> Step:
        """Loss without gradient; arguments as in :meth:`forward_backward`. Draws nothing.

        Args:
            return_logprobs: give each counted token's log-probability in ``step.logprobs``
                [batch, tokens], at the token itself; 0 where there is none.
            on_logits: called with a first token and logits [batch, tokens, vocabulary] of each
                slice in turn, on each rank of a mesh those of its own tokens. It runs all tokens
                but trailing padding; none has to be a target.

        Returns:
            Step: as of :meth:`forward_backward`; no gradient is made or changed.

        Raises:
            ValueError, OutOfMemoryError, Error: as :meth:`forward_backward`.
        """
        given = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
            "loss_weights": loss_weights,
            "num_items_in_batch": num_items_in_batch,
            "every_token": on_logits is not None,
        }

        def prepare() -> CallInputs:
            check_callable("on_progress", on_progress)
            check_callable("on_logits", on_logits)
            return self._admission.checked(input_ids, labels, images=images, **given)

        wanted: dict[str, Any] = dict(return_logprobs=return_logprobs, token_metrics=token_metrics)
        inputs = self._admission.together(prepare, images)
        self._admission.expect_alike(images, input_ids=input_ids, labels=labels, **given, **wanted)

        def run() -> Step:
            begun = self._calls.under_way(
                self.config, inputs, None, on_progress=on_progress, **wanted
            )
            with self._placement.call(), begun as call:
                with call.loop.running():
                    seconds = call.loop.evaluate(on_logits)
                step = call.result(seconds)
                self._placement.settle(lambda: None)
                return step

        return as_before_afterwards(run)

    def two_pass(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        temperature: float = 1.0,
        logprobs: bool = True,
        entropies: bool = False,
        hidden: bool = False,
        statistics: Sequence[str] = (),
        share_prefixes: bool | str = False,
        on_progress: OnProgress | None = None,
        **images: torch.Tensor | None,
    ) -> TwoPass:
        """Any loss of per-token values, exactly; see :class:`oomb.TwoPass`.

            with engine.two_pass(input_ids, labels) as call:
                loss = my_loss(call.logprobs)
                loss.backward()
                call.sweep()  # adds to param.grad

        Args:
            labels: which tokens have values: those that are not -100; None: all but padding.
            temperature: divides the logits.
            logprobs, entropies, hidden, statistics: which values; see :class:`oomb.TwoPass`.
            share_prefixes: what rows share from their start (a prompt, turns) is run once, with the
                same values and gradients; ``"auto"``: where that is less work.

        Others are as of :meth:`forward_backward`. Under ``torch.no_grad()`` the values are
        constants, no chunk is drawn, and there is nothing to sweep.

        Raises:
            ValueError, Error: as :meth:`forward_backward`; nothing was run.
        """
        return TwoPass(
            self._calls,
            self._pools,
            self._training,
            self._admission,
            Wanted.checked(logprobs, entropies, hidden, temperature, statistics),
            on_progress,
            share_prefixes,
            input_ids,
            labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            images=images,
        )

    @property
    def layer_windows(self) -> list[int]:
        """Sliding window of each layer; 0: none."""
        of_layers = self._shapes[:: self._shapes[0].groups]
        windows = {x: of_layers[page].window for x, page in self._model.paged.items()}
        return [windows.get(layer, 0) for layer in range(len(self._model.layers))]

    # Around calls ---------------------------------------------------------------------------------

    def plan(self, num_tokens: int, batch_size: int = 1, *, image_tokens: int = 0) -> Plan:
        """What ``forward_backward`` on such a batch takes, and whether it fits now.

        Args:
            num_tokens: of the longest sequence.
            batch_size: sequences.
            image_tokens: of each of them, that show images.

        Raises:
            ValueError: a number is none, or too large.
        """
        check_planned(num_tokens, batch_size, image_tokens)
        self._admission.expect_own_process()
        swept = self._training.upcoming(self._calls.planned_chunks(self.config, num_tokens).number)
        of_call = self.config, num_tokens, batch_size, image_tokens, swept
        return as_before_afterwards(lambda: self._calls.plan(*of_call))

    def main_grad(self, parameter: nn.Parameter) -> torch.Tensor:
        """The last call's gradient of a parameter, in fp32 (fp64 for fp64 models).

        With ``main_grad_dtype="bfloat16"`` that of a bf16 parameter is in bf16.

        Args:
            parameter: one of the model's.

        Returns:
            A tensor of its shape, on its device (with ``main_grad_device="host"`` on the host, of a
            shard a copy); the engine's own, valid until the next call.

        Raises:
            ValueError: ``Config(keep_main_grad=True)`` is not set, or nothing reached it.
        """
        expect(isinstance(parameter, torch.Tensor), "parameter", "a parameter", kind_of(parameter))
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
        return self._training.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`.

        Raises:
            ValueError: no such state, or one of another sampling seed.
        """
        self._training.load(state)

    def close(self) -> None:
        """Give the pools back, at the end of a call that runs. The model can be used afterwards.

        In a process forked from the engine's own nothing is given back, and nothing waited for.
        """
        self._admission.close()
        for part in (self._pools.close_for_good, self._grads.clear, self._placement.close):
            one_call.when_none(part)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
