"""The end of an optimizer step, which a checkpoint written later is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from oomb.hf.resumable import ResumableTrainer


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """What a checkpoint of the last finished step holds besides weights and optimizer, which change
    at its end only.

    A shuffling sampler may draw an epoch's order from the global generators, so that the order
    comes back only from their state at its beginning: ``epoch_random``. ``own`` is a subclass's.
    """

    random: dict[str, Any]
    epoch_random: dict[str, Any]
    engine: dict[str, Any]
    own: dict[str, Any]
    tokens_seen: float
    total_flos: float
    current_flos: float


class RemembersSteps(TrainerCallback):
    """Last of the callbacks, so that it sees the random state that they leave."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._remember()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._begin_epoch()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._remember()

    def on_log(self, *_: Any, **named: Any) -> None:
        # The summary at the end of training belongs to no step.
        if "train_runtime" not in named["logs"]:
            self._trainer._is_outdated()
