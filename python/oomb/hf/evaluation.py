"""Evaluation of a transformers Trainer through the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from oomb.engine.engine import Engine
from oomb.hf.batch import engine_arguments, num_targets
from oomb.hf.predictions import Predictions, Preprocess
from oomb.hf.random_state import random_state, restore_random_state
from oomb.hf.resumable import ResumableTrainer
from oomb.results import Step


class EvaluatingTrainer(ResumableTrainer):
    """Losses, predictions and metrics of a subclass's engine.

    Attributes:
        max_logit_bytes: of whole logits that an evaluation with ``compute_metrics`` may keep.
    """

    engine: Engine
    max_logit_bytes = 2**30
    _evaluated_tokens = 0
    _logit_bytes = 0
    _preprocess: Preprocess | None = None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Loss; unless that is all, also predictions and the labels.

        Predictions [batch, tokens, …] are what ``preprocess_logits_for_metrics`` makes of logits;
        without it logits, if there is a ``compute_metrics``, else the labels' log-probabilities.

        Raises:
            ValueError: the logits would take more than ``max_logit_bytes``.
        """
        self._check_signals()
        arguments = engine_arguments(self._prepare_inputs(inputs))
        labels, targets = arguments["labels"], num_targets(arguments)
        self._evaluated_tokens += targets
        predictions = None if prediction_loss_only else self._predictions_of(labels)
        nothing = torch.full((), float("nan"), device=self.args.device)
        call = None
        with self.replicas.step():  # a signal to one ends the evaluation of all
            if targets > 0 or predictions is not None:
                with self.accelerator.autocast(), self.compute_loss_context_manager():
                    call = self.engine.evaluate(
                        **arguments,
                        return_logprobs="token_loss" in self._asked
                        or (not prediction_loss_only and predictions is None),
                        on_progress=lambda _: self._signals.check(),
                        on_logits=None if predictions is None else predictions.add,
                        token_metrics="token_metrics" in self._asked,
                    )
        if call is not None:
            self._told(call)
        loss = nothing if call is None or targets == 0 else self._evaluated(call)
        if prediction_loss_only:
            return loss, None, None
        if call is None:
            return loss, torch.zeros_like(labels, dtype=torch.float32), labels
        return loss, call.logprobs if predictions is None else predictions.joined(), labels

    @property
    def _asked(self) -> dict[str, Any]:
        """Further arguments of ``engine.forward_backward``."""
        return {}

    def _told(self, step: Step) -> None:
        """What a call has given, for the trainer's metrics."""

    def _evaluated(self, step: Step) -> torch.Tensor:
        """Loss of an evaluation."""
        return step.loss

    def _predictions_of(self, labels: torch.Tensor) -> Predictions | None:
        """None where log-probabilities take the place of predictions."""
        if self._preprocess is None:
            if self.compute_metrics is None:
                return None
            self._expect_room_for_logits(labels.numel())
        return Predictions(labels, self._preprocess, in_float=self.accelerator.native_amp)

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """As the stock trainer's, but ``preprocess_logits_for_metrics`` sees slices of a batch, and
        log-probabilities are 0 where a row of another batch is longer."""
        stock = self.preprocess_logits_for_metrics
        self._logit_bytes = self._evaluated_tokens = 0
        self._preprocess = stock
        if stock is not None:  # it has been applied to what prediction_step returns
            self.preprocess_logits_for_metrics = lambda predictions, _: predictions
        try:
            found = super().evaluation_loop(*args, **keywords)
            if stock is None and self.compute_metrics is None:
                _clear_padding(found.predictions, found.label_ids)
            return found
        finally:
            self.preprocess_logits_for_metrics, self._preprocess = stock, None

    def _expect_room_for_logits(self, num_tokens: int) -> None:
        """Of a batch; the stock trainer keeps those of all batches, unless told otherwise."""
        batch_alone = self.args.batch_eval_metrics
        weight: Any = self.model.get_input_embeddings().weight
        of_value = 4 if self.accelerator.native_amp else weight.element_size()
        size = num_tokens * weight.shape[0] * of_value
        self._logit_bytes = size if batch_alone else self._logit_bytes + size
        if self._logit_bytes > self.max_logit_bytes:
            raise ValueError(
                f"compute_metrics: expected logits of at most {self.max_logit_bytes} bytes, the "
                f"trainer's max_logit_bytes, got {self._logit_bytes} or more for "
                f"{'a batch' if batch_alone else 'the evaluation'}: pass "
                "preprocess_logits_for_metrics, which keeps of each slice what the metrics need"
                f"{'' if batch_alone else ', or set batch_eval_metrics=True'}"
            )

    def evaluate(self, *args: Any, **keywords: Any) -> dict[str, float]:
        """As the stock trainer's; draws no random number that training would draw."""
        state = random_state(self.args.device)
        try:
            metrics: dict[str, float] = super().evaluate(*args, **keywords)
        finally:
            restore_random_state(state, self.args.device)
        return metrics


def _clear_padding(logprobs: Any, labels: Any) -> None:
    """The stock trainer fills rows of all batches up to one length, both with -100."""
    if isinstance(logprobs, np.ndarray) and isinstance(labels, np.ndarray):
        logprobs[labels == -100] = 0
