"""Checkpoints of a transformers Trainer: safe files only, verified, at any step and on SIGTERM."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, has_length

from oomb.checkpoint import (
    CheckpointError,
    CheckpointStore,
    load_state,
    model_identity,
    save_state,
)
from oomb.hf.changed_settings import ARGUMENTS_FILE, ChangedSettings, arguments_as_json
from oomb.hf.converted import load_converted
from oomb.hf.due_evaluation import DueEvaluationTrainer
from oomb.hf.finished_step import FinishedStep, RemembersSteps
from oomb.hf.interrupt import Interrupted, SignalWatch
from oomb.hf.optimizer_files import OptimizerFiles
from oomb.hf.random_state import random_state, restore_random_state
from oomb.hf.resume_choice import checkpoint_to_resume, is_own
from oomb.hf.saved_training import CHECKPOINTS, TRAINING
from oomb.hf.step_layout import StepLayout, expect_same_order

_log = transformers.logging.get_logger("oomb.hf")
_TRAINER_STATE = "trainer_state.json"  # transformers reads it under this name
_REFERENCE = "reference"  # weights of TRL's reference model, where it follows the trained one


class ResumableTrainer(DueEvaluationTrainer):
    """A Trainer whose checkpoints are those of :class:`oomb.checkpoint.CheckpointStore`.

    They stand in ``output_dir/checkpoints`` and hold no pickle. A resumed run takes the same steps
    as one without a break. SIGTERM and SIGINT end training at the next chunk border with a
    checkpoint of the last finished step and raise :class:`oomb.hf.Interrupted`.
    """

    model: Any  # the stock trainer's types allow what only is so before training
    optimizer: Any
    lr_scheduler: Any
    ref_model: Any = None  # of TRL's trainers
    engine: Any  # of subclasses

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._signals = SignalWatch()
        self._finished: FinishedStep | None = None
        self._resumed: dict[str, Any] | None = None
        self._epoch_random: dict[str, Any] | None = None
        self._own_step: int | None = None  # resumed from a checkpoint of this run
        # Whose checkpoint is on the disk, with all that was logged and evaluated since.
        self._saved_step: int | None = None
        self._weights_from: str | None = None  # the checkpoint that is being loaded
        self.add_callback(RemembersSteps(self))

    def checkpoint_store(self, trial: Any = None) -> CheckpointStore:
        """The checkpoints of this run; ``save_total_limit`` of them are kept."""
        folder = Path(self._get_output_dir(trial)) / CHECKPOINTS
        limit = self.args.save_total_limit
        # To the stock trainer, too, zero and less mean that there is no limit.
        return CheckpointStore(folder, keep_last=limit if limit and limit > 0 else None)

    # Resuming -------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; see ``transformers.Trainer.train``.

        Args:
            resume_from_checkpoint: True: the newest intact checkpoint of ``output_dir``; or the
                folder of one.

        Raises:
            ValueError: there are checkpoints that would mix with this run's.
            CheckpointError: none can be resumed from; the message says why.
            Interrupted: SIGTERM or SIGINT came.
        """
        store = self.checkpoint_store(trial)
        identity = model_identity(self.model)
        checkpoint = self.job.by_first(
            lambda: checkpoint_to_resume(
                resume_from_checkpoint,
                store,
                identity,
                saves=self.args.save_strategy != SaveStrategy.NO,
            )
        )
        self._own_step = checkpoint.step if checkpoint and is_own(checkpoint, store) else None
        with self._signals:
            try:
                output = super().train(
                    resume_from_checkpoint=str(checkpoint.path) if checkpoint else None,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
                self._check_signals()
            except Interrupted as interrupted:
                abandoned = self._abandon_step(interrupted.reason, trial)
                if self.job.is_first:
                    _log.warning(str(abandoned))
                raise abandoned from None
        return output

    def _check_signals(self) -> None:
        """Raise :class:`Interrupted` on all ranks if a signal came to one."""
        came = [one for one in self.job.collect(lambda: self._signals.received) if one is not None]
        if came:
            raise Interrupted(came[0])

    def _init_training_state(
        self, max_steps: int, per_epoch: int, num_epochs: int, *given: Any
    ) -> tuple[int, int]:
        """Begin training, or begin it anew with the next batch size of ``auto_find_batch_size``.

        Nothing of an abandoned attempt stays: what it saved for a step is not what this one trains.
        """
        self._finished = self._resumed = self._epoch_random = None
        self._saved_step, self._evaluation_is_due = self._own_step, False
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, per_epoch, num_epochs, *given
        )
        # The stock trainer goes on with the checkpoint's intervals of saving and evaluating.
        self.state.compute_steps(self.args, max_steps)
        # The stock trainer looks at max_steps only behind a step, so a finished run would take one
        # more each time that it is resumed: no epoch is left.
        finished = 0 < max_steps <= self.state.global_step
        return (num_epochs, 0) if finished else begin

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not (Path(checkpoint) / f"{TRAINING}.json").exists():
            raise CheckpointError(
                f"resume_from_checkpoint: {checkpoint} holds the model only (save_only_model)"
            )
        # transformers counts the passes over a data set by its length.
        if not has_length(self.train_dataset) and (self.state.epoch or 0) > 1:
            raise CheckpointError(
                "train_dataset: expected one with a length, got one without that was read more "
                "than once before the checkpoint: its position cannot be restored"
            )
        on_cpu = self.args.device.type == "cpu"
        self._resumed = load_state(Path(checkpoint), TRAINING, copy=on_cpu)
        self._check_layout(self._resumed)
        self._resumed["optimizer"] = self._optimizer_files().load(Path(checkpoint), copy=on_cpu)
        changed = ChangedSettings(Path(checkpoint), self.args)
        if not self.args.ignore_data_skip:
            changed.expect_same_order(
                seeded=self.accelerator.use_seedable_sampler and has_length(self.train_dataset)
            )
        changed.load(self.optimizer, self.lr_scheduler, self._resumed)
        del self._resumed["optimizer"]
        if changed.values and self.job.is_first:
            _log.warning(f"resumed with {changed}")
        self.engine.load_state_dict(self._resumed["engine"])
        self._evaluation_is_due = self._resumed.get("evaluation_is_due", False)
        self._take_own_state(self._resumed.get("own", {}))
        self._load_reference(Path(checkpoint))

    def _optimizer_files(self) -> OptimizerFiles:
        model = self.accelerator.unwrap_model(self.model)
        return OptimizerFiles(self.optimizer, model, self.job)

    @property
    def _moving_reference(self) -> nn.Module | None:
        """A reference model that steps change; others come from where the run began."""
        return self.ref_model if getattr(self.args, "sync_ref_model", False) else None

    def _load_reference(self, checkpoint: Path) -> None:
        reference = self._moving_reference
        if reference is None:
            return
        if not (checkpoint / f"{_REFERENCE}.json").exists():
            raise CheckpointError(
                f"sync_ref_model: expected False, as when {checkpoint} was written, got True: the "
                "checkpoint has no reference model"
            )
        saved = load_state(checkpoint, _REFERENCE, copy=False)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(saved[name])

    def _layout(self) -> StepLayout:
        groups = self.replicas.number
        # With split_batches a batch is that of all groups.
        divisor = groups if self.accelerator.split_batches else 1
        return StepLayout(
            batch_size=self._train_batch_size // divisor,
            accumulation_steps=self.args.gradient_accumulation_steps,
            groups=groups,
        )

    def _check_layout(self, state: dict[str, Any]) -> None:
        """Refuse to go on at another place in the data, unless that is asked for."""
        now = self._layout()
        before = now.before(state)
        if not self.args.ignore_data_skip:
            now.expect_as_many(before, "gradient_accumulation_steps")
            expect_same_order(self, now, before)
        self.state.train_batch_size = self._train_batch_size
        if now != before and self.job.is_first:
            _log.warning(f"resumed with {now} ({before} before)")

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if self._resumed is not None and scaler is not None and self._resumed["scaler"]:
            scaler.load_state_dict(self._resumed["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is not None:
            restore_random_state(self._resumed["random"], self.args.device)

    def _begin_epoch(self) -> None:
        """Before the epoch's order is drawn; for the rest of an epoch, drawn as it was."""
        if self._epoch_random is None and self._resumed is not None:
            restore_random_state(self._resumed["epoch_random"], self.args.device)
        self._epoch_random = random_state(self.args.device)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Says nothing about tied weights, which lie in the file once; loads what it does not name.

        The stock trainer calls it when it has loaded weights by the model's names.
        """
        absent = self._absent(load_result)
        model = self.accelerator.unwrap_model(self.model)
        if absent and isinstance(model, PreTrainedModel):
            assert self._weights_from is not None
            load_result = load_converted(model, self._weights_from)
            absent = self._absent(load_result)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=absent))

    def _absent(self, load_result: Any) -> list[str]:
        """Weights that were not loaded, under any of their names."""
        absent = load_result.missing_keys
        named = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = {id(parameter) for name, parameter in named.items() if name not in absent}
        return [name for name in absent if id(named.get(name)) not in loaded]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._weights_from = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._check_signals()
        self._weights_from = self.state.best_model_checkpoint
        self.job.together(lambda: CheckpointStore.verified(str(self.state.best_model_checkpoint)))
        super()._load_best_model()
        self._finished = None  # the weights are no longer those of the last step

    # Saving ---------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """The state at the end of an optimizer step, before anything of the next one."""
        of_epoch = self._epoch_random
        if self._finished is None and self._resumed is not None:  # restored later
            random, of_epoch = self._resumed["random"], self._resumed["epoch_random"]
        else:
            random = random_state(self.args.device)
        if of_epoch is None or float(self.state.epoch or 0).is_integer():
            of_epoch = random  # the next epoch begins here
        self._finished = FinishedStep(
            random=random,
            epoch_random=of_epoch,
            engine=self.engine.state_dict(),
            own=self._own_state(),
            tokens_seen=self.state.num_input_tokens_seen,
            total_flos=self.state.total_flos,
            current_flos=self.current_flos,
        )

    def _is_outdated(self) -> None:
        self._saved_step = None

    def _abandon_step(self, reason: str, trial: Any) -> Interrupted:
        """Forget the step under way and save the one before it."""
        self.model.zero_grad()
        self.is_in_train = False
        step, finished = self.state.global_step, self._finished
        if self.args.save_strategy == SaveStrategy.NO or finished is None:
            return Interrupted(reason, step, None)
        self.state.num_input_tokens_seen = int(finished.tokens_seen)
        self.state.total_flos = finished.total_flos
        self.current_flos = int(finished.current_flos)
        return Interrupted(reason, step, self._save_finished_step(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        path = self._save_finished_step(trial)
        if self.args.push_to_hub and self.job.is_first:
            self._push_from_checkpoint(str(path))

    def _save_finished_step(self, trial: Any) -> Path:
        store, step = self.checkpoint_store(trial), self.state.global_step
        path = store.path_of(step)
        if self._saved_step == step:
            return path
        began = time.perf_counter()
        self.store_flos()
        best = self.state.best_global_step
        store.save(
            step,
            lambda folder: self._write_checkpoint(folder, store),
            identity=model_identity(self.model),
            keep=[store.path_of(best)] if best else [],
            by_first=self.job.by_first,
        )
        num_bytes, self.state.best_model_checkpoint = self.job.by_first(
            lambda: (
                sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
                self.state.best_model_checkpoint,
            )
        )
        self._saved_step = step
        self._checkpoint_saved(path, time.perf_counter() - began, num_bytes)
        return path

    def _write_checkpoint(self, folder: Path, store: CheckpointStore) -> None:
        if not self.args.save_only_model:
            self._optimizer_files().save(folder)
        with self.whole_weights():
            self.job.by_first(lambda: self._write_by_first(folder, store))

    def _write_by_first(self, folder: Path, store: CheckpointStore) -> None:
        best = self.state.best_global_step
        if best and (best == self.state.global_step or store.path_of(best).exists()):
            self.state.best_model_checkpoint = str(store.path_of(best))
        self.save_model(str(folder), _internal_call=True)
        stateful: Any = self.state.stateful_callbacks
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                stateful[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(folder / _TRAINER_STATE))
        if self.args.save_only_model:
            return
        assert self._finished is not None
        scaler = getattr(self.accelerator, "scaler", None)
        state = {
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "random": self._finished.random,
            "epoch_random": self._finished.epoch_random,
            "engine": self._finished.engine,
            "own": self._finished.own,
            "evaluation_is_due": self._evaluation_is_due,
            **self._layout().as_state(),
        }
        save_state(folder, TRAINING, state)
        if self._moving_reference is not None:
            save_state(folder, _REFERENCE, dict(self._moving_reference.named_parameters()))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Model, tokenizer and arguments, as ``from_pretrained`` loads them; nothing pickled."""
        folder = Path(output_dir if output_dir is not None else str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.accelerator.unwrap_model(self.model)
        whole = state_dict if state_dict is not None else self._whole_weights
        model.save_pretrained(str(folder), state_dict=whole)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        (folder / ARGUMENTS_FILE).write_text(arguments_as_json(self.args))

    # For subclasses -------------------------------------------------------------------------------

    def _checkpoint_saved(self, path: Path, seconds: float, num_bytes: int) -> None:
        """A checkpoint is complete."""

    def _own_state(self) -> dict[str, Any]:
        """What steps of a subclass change besides, at their end."""
        return {}

    def _take_own_state(self, state: dict[str, Any]) -> None:
        """That of the step that training goes on from; empty where it was not kept."""
