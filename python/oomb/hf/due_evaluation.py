"""An evaluation that a signal ended: a resumed run makes it before its first step."""

from __future__ import annotations

from typing import Any

from transformers.trainer_utils import SaveStrategy

from oomb.hf.random_state import random_state, restore_random_state
from oomb.hf.sharded import ShardedTrainer


class DueEvaluationTrainer(ShardedTrainer):
    """A ShardedTrainer that knows whether the evaluation of its last step was begun and not ended.

    Without it a resumed run could lack its best step, its early stop, or a change of the rate.
    """

    _evaluation_is_due = False

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if skip_scheduler:  # at the start, which each run does again
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        self._evaluation_is_due = True
        self._is_outdated()
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        self._evaluation_is_due = False
        return metrics

    def _run_epoch(self, *args: Any, **keywords: Any) -> None:
        self._make_due_evaluation(keywords["trial"], keywords["ignore_keys_for_eval"])
        if not self.control.should_training_stop:  # by what was evaluated
            super()._run_epoch(*args, **keywords)  # type: ignore[no-untyped-call]

    def _finalize_training(self, trial: Any, *args: Any) -> Any:
        self._make_due_evaluation(trial, None)  # where no step is left
        return super()._finalize_training(trial, *args)  # type: ignore[no-untyped-call]

    def _make_due_evaluation(self, trial: Any, ignore_keys_for_eval: list[str] | None) -> None:
        if not self._evaluation_is_due:
            return
        if self.eval_dataset is None:  # it goes on without
            self._evaluation_is_due = False
            self._is_outdated()
            return
        # The rest of an epoch whose order the global generators drew is drawn again after this.
        random = random_state(self.args.device)
        metrics = self._evaluate(trial, ignore_keys_for_eval)
        self._determine_best_metric(metrics=metrics, trial=trial)
        if self.args.save_strategy != SaveStrategy.NO:
            self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        restore_random_state(random, self.args.device)

    def _is_outdated(self) -> None:
        """A checkpoint of the last step on the disk does not say what the trainer knows."""
        raise NotImplementedError
