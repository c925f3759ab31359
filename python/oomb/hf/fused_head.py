"""What TRL's trainers ask a model for, answered by an engine.

They call ``model(…, labels=labels, fused_lm_head=True)`` and get values of each token. That one
door is replaced while a step runs; every other call of the model is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from oomb.engine.engine import Engine
from oomb.engine.two_pass import TwoPass
from oomb.hf.batch import engine_arguments
from oomb.hf.left_padding import left_padding, turned
from oomb.results import Progress, Stats

_NOT_OF_THE_ENGINE = ("use_cache", "num_items_in_batch")


class FusedHead:
    """Answers calls of one model through one engine.

    Args:
        model: the causal language model itself, inside adapters.
        autocast: makes the caller's autocast context.

    Attributes:
        pending: calls whose values have gone into a loss; they wait for their sweep.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        temperature: float,
        statistics: tuple[str, ...],
        autocast: Callable[[], AbstractContextManager[object]],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._model, self._engine = model, engine
        self._temperature, self._statistics = temperature, statistics
        self._autocast, self._on_progress = autocast, on_progress
        self._before: object = None  # the model's own forward attribute, if it has one
        self.pending: list[TwoPass] = []

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, the model's calls come here first; calls left pending end without a sweep."""
        attributes = vars(self._model)
        self._before = attributes.get("forward")
        forward = self._model.forward

        def answer(*args: Any, fused_lm_head: bool = False, **keywords: Any) -> Any:
            if not self._asked(fused_lm_head):
                return forward(*args, **keywords)
            if args:
                keywords["input_ids"], *more = args
                assert not more, "TRL names all but the first"
            with self._aside():
                return self._values(keywords)

        attributes["forward"] = answer
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._set_forward(self._before)
            while self.pending:
                self.pending.pop().__exit__(type(error), error, None)

    def _asked(self, fused_lm_head: bool) -> bool:
        """Whether a call of the model is one for the engine."""
        return fused_lm_head

    def sweep(self) -> list[tuple[int, Stats]]:
        """Back-propagate all that is pending; of each the labelled tokens, time and memory."""
        done: list[tuple[int, Stats]] = []
        with self._aside():
            while self.pending:
                call = self.pending[0]
                stats = call.sweep()
                done.append((call.num_valid_tokens, stats))
                self.pending.pop(0)
        return done

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The engine sees the model without this object."""
        answer = vars(self._model).get("forward")
        self._set_forward(self._before)
        try:
            yield
        finally:
            self._set_forward(answer)

    def _set_forward(self, forward: object) -> None:
        if forward is None:
            vars(self._model).pop("forward", None)
        else:
            vars(self._model)["forward"] = forward

    def _values(self, keywords: dict[str, Any]) -> Any:
        """What the model answers."""
        divisor = keywords.get("num_items_in_batch")
        arguments: dict[str, Any] = engine_arguments(
            {name: x for name, x in keywords.items() if name not in _NOT_OF_THE_ENGINE}
        )
        labels = arguments["labels"]
        counted = labels[:, 1:] != -100
        if not bool(counted.any()):
            return self._nothing(counted)
        mask, back = arguments.get("attention_mask"), None
        padding = None if mask is None else left_padding(mask)
        if padding is not None and bool(padding.any()):
            places = torch.arange(labels.shape[1], device=labels.device)
            arguments.setdefault("position_ids", places.expand_as(labels))
            columns = ("input_ids", "labels", "attention_mask", "position_ids")
            arguments |= {name: turned(arguments[name], padding) for name in columns}
            back = -padding
        with self._autocast():
            call = self._engine.two_pass(
                **arguments,
                temperature=self._temperature,
                entropies=True,
                statistics=self._statistics,
                share_prefixes="auto",
                on_progress=self._on_progress,
            ).__enter__()
        if torch.is_grad_enabled():
            self.pending.append(call)
        found = {"log_probs": call.logprobs, "entropy": call.entropies, **call.statistics}
        if back is not None:
            found = {name: turned(value, back) for name, value in found.items()}
        found = {name: value[:, 1:] for name, value in found.items()}
        number = counted.sum() if divisor is None else divisor
        return FusedCausalLMOutput(
            loss=-found["log_probs"].sum() / number, label_mask=counted, **found
        )

    def _nothing(self, counted: torch.Tensor) -> FusedCausalLMOutput:
        """Of a batch without a label: zeros that a loss can be made of."""
        zeros = torch.zeros(counted.shape, device=counted.device)
        if torch.is_grad_enabled():
            zeros.requires_grad_()
        constants = {name: torch.zeros_like(zeros.detach()) for name in self._statistics}
        if "is_top1" in constants:
            constants["is_top1"] = constants["is_top1"].bool()
        return FusedCausalLMOutput(
            loss=zeros.sum(), log_probs=zeros, entropy=zeros, label_mask=counted, **constants
        )
