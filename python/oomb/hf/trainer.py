"""A transformers Trainer whose forward and backward are the engine's."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import TrainerCallback

from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.engine.router_loss import asks_for_router_loss
from oomb.hf.batch import ENGINE_COLUMNS, counted_labels, engine_arguments, num_targets
from oomb.hf.evaluation import EvaluatingTrainer
from oomb.hf.interrupt import Interrupted
from oomb.hf.one_gpu import use_one_gpu
from oomb.hf.refusals import refuse_arguments, refuse_own_loss
from oomb.hf.resumable import ResumableTrainer
from oomb.hf.step_record import StepRecord
from oomb.monitor import RunObserver
from oomb.monitor.metrics import in_json
from oomb.optim import HostStates
from oomb.parallel.whole import is_sharded
from oomb.results import Progress, Step

_log = transformers.logging.get_logger("oomb.hf")


class EngineTrainerMixin(EvaluatingTrainer):
    """Put before a subclass of ``transformers.Trainer``, it makes it train through the engine.

    ``class MyTrainer(EngineTrainerMixin, TheirTrainer)``. Their ``compute_loss`` must be the stock
    one: cross-entropy of the next token.

    Started by torchrun or ``accelerate launch``, all processes share each sequence, or as many of
    them as ``TrainingArguments(parallelism_config=ParallelismConfig(cp_size=…))`` says.

    Args:
        oomb_config: settings of the engine; None: the defaults.
        observer: receives the run's events (see :mod:`oomb.monitor`), on rank 0.
        optimizer_states: ``"device"``, or ``"host"``: the optimizer, whichever ``optim=`` names,
            keeps its states in host memory (:class:`oomb.optim.HostStates`).
        shard_weights: the ranks of a sequence share weights, gradients and optimizer states, as
            ``oomb_config.sharded_weights`` says; a model on the CPU is never whole on a GPU. On
            ranks other than the first it may be on the meta device: they get rank 0's weights. A
            model that is sharded over these ranks already is taken as it is.

    Everything else is as in the trainer it stands before.

    Raises:
        ValueError: a setting that the engine cannot honour; the message names it.
        UnsupportedModelError: the model cannot be run exactly.
    """

    def __init__(
        self,
        *args: Any,
        oomb_config: Config | None = None,
        observer: RunObserver | None = None,
        optimizer_states: str = "device",
        shard_weights: bool = False,
        **keywords: Any,
    ) -> None:
        if oomb_config is not None and not isinstance(oomb_config, Config):
            raise ValueError(f"oomb_config: expected an oomb.Config, got {oomb_config!r}")
        if observer is not None and not callable(getattr(observer, "on_step", None)):
            raise ValueError(f"observer: expected an oomb.monitor.RunObserver, got {observer!r}")
        if optimizer_states not in ("device", "host"):
            raise ValueError(
                f"optimizer_states: expected 'device' or 'host', got {optimizer_states!r}"
            )
        named = self._named(args, keywords)
        refuse_arguments(named)
        self._refuse_ranks(named)
        self._use_one_gpu(named.get("args"))
        self.optimizer_states = optimizer_states
        self.shard_weights = shard_weights
        self.oomb_config = oomb_config if oomb_config is not None else Config()
        super().__init__(*args, **keywords)
        if self._keeps_weights_on_host or self._has_shards:
            self.accelerator.device_placement = False  # it would move the model
        refuse_arguments(vars(self))
        self._use_one_gpu(self.args)  # where it made them itself
        self._train_batch_size = self.args.train_batch_size
        self._refuse_loss()
        self.observer = observer if self.job.is_first else None
        # Tokens of a sequence at most, told to the observer; only TRL's arguments say it.
        self.context: int | None = getattr(self.args, "max_length", None)
        self._record, self._data_seconds = StepRecord(), 0.0
        self._warned_of_no_target = False
        self._build_engine()
        self.add_callback(_Reports(self))

    @staticmethod
    def _use_one_gpu(settings: Any) -> None:
        told = None if settings is None else use_one_gpu(settings)
        if told is not None:
            warnings.warn(told, RuntimeWarning, stacklevel=3)

    def _refuse_loss(self) -> None:
        """Raises ValueError where the trainer's loss is not the one that is computed here."""
        refuse_own_loss(self)

    def _refuse_ranks(self, named: Mapping[str, Any]) -> None:
        """Raises ValueError where several processes cannot train so together."""

    def _named(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Mapping[str, Any]:
        """Arguments by name, as the stock trainer behind this class takes them."""
        stock = next(
            kind
            for kind in type(self).__mro__
            if "__init__" in vars(kind) and not issubclass(kind, ResumableTrainer)
        )
        signature = inspect.signature(stock)
        return signature.bind_partial(*args, **keywords).arguments

    @property
    def _keeps_weights_on_host(self) -> bool:
        return self.oomb_config.weights == "host"

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Does nothing where the engine or sharding places the model."""
        if not (self._keeps_weights_on_host or self._will_shard or is_sharded(model)):
            super()._move_model_to_device(model, device)

    def _build_engine(self) -> None:
        if self.is_model_parallel:
            raise ValueError(
                "model: expected one on a single device, got a device map of several: "
                "one process drives one GPU"
            )
        self._shard()
        # accelerate's autocast around the forward would tell the engine's check another result.
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.engine = Engine(model, self.oomb_config, mesh=self.replicas.mesh)
        self._engine_model = self.model

    def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
        """As the stock trainer's, with its states where ``optimizer_states`` says."""
        made = super().create_optimizer(*args, **keywords)
        inner = getattr(made, "optimizer", None)  # of accelerate's, behind an earlier train()
        is_ours = isinstance(made, HostStates) or isinstance(inner, HostStates)
        if self.optimizer_states == "host" and not is_ours:
            # What a step has used is not looked at again: the stock trainer zeroes it.
            self.optimizer = made = HostStates(made, free_gradients=True)
        return made

    def _prepare_for_training(self, *args: Any, **keywords: Any) -> Any:
        if self._engine_model is not self.model:  # made anew by model_init
            self.engine.close()
            self._build_engine()
        return super()._prepare_for_training(*args, **keywords)  # type: ignore[no-untyped-call]

    # Steps ----------------------------------------------------------------------------------------

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Loss of one micro-batch, its gradient added to the parameters; 0-d tensor."""
        self._check_signals()
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        arguments = engine_arguments(self._prepare_inputs(inputs))
        scale = self._loss_scale()
        with self.replicas.step():
            call = self._call(arguments, num_items_in_batch, scale)
            if self.accelerator.sync_gradients:
                self.replicas.add_gradients([p for p in model.parameters() if p.requires_grad])
        if call is None:
            return torch.zeros((), device=self.args.device)
        self._told(call)
        loss = call.loss / scale
        self._record.add(call, loss, arguments["input_ids"].numel())
        if self.observer is not None and call.selection:
            self.observer.on_selection(self.state.global_step + 1, call.selection)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss * self.replicas.number  # the mean over processes is logged

    def _call(
        self,
        arguments: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | int | None,
        scale: float,
    ) -> Step | None:
        """This replica's share of the gradient; None: its batch has nothing to predict."""
        targets, replicas = num_targets(arguments), self.replicas.number
        routed = num_items_in_batch is not None and asks_for_router_loss(self.model)
        if targets == 0 and not routed:  # no loss and no gradient
            self._warn_of_no_target()
            state = self.engine.state_dict()
            # Replicas draw alike: one without targets draws too.
            self.engine.load_state_dict({**state, "step": state["step"] + 1})
            return None
        if num_items_in_batch is None:
            num_items_in_batch = targets * self.current_gradient_accumulation_steps * replicas
        elif not self.args.average_tokens_across_devices:  # those of this replica alone
            num_items_in_batch = num_items_in_batch * replicas
        with self.accelerator.autocast(), self.compute_loss_context_manager():
            return self.engine.forward_backward(
                **arguments,  # type: ignore[arg-type]
                num_items_in_batch=float(num_items_in_batch) / scale,  # type: ignore[arg-type]
                on_progress=self._training_progress,
                **self._asked,
            )

    def _warn_of_no_target(self) -> None:
        if not self._warned_of_no_target and self.job.is_first:
            self._warned_of_no_target = True
            _log.warning(
                f"step {self.state.global_step + 1}: a batch has no token to predict (labels are "
                "all -100, or one token long), so it has no loss and no gradient; said once"
            )

    def _training_progress(self, progress: Progress) -> None:
        if self.observer is not None:
            self.observer.on_progress(self.state.global_step + 1, progress)
        self._signals.check()

    def _loss_scale(self) -> float:
        """Factor of fp16's gradient scaler, which the optimizer divides by again."""
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is None:
            return 1.0
        return float(scaler.scale(torch.ones((), device=self.args.device)))

    def get_batch_samples(self, *args: Any, **keywords: Any) -> Any:
        """Batches of a step. It is told with the wait for them: data may be what slows a run."""
        began = time.perf_counter()
        batches = super().get_batch_samples(*args, **keywords)
        self._data_seconds = time.perf_counter() - began
        return batches

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Targets of all micro-batches of a step, as the engine counts them."""
        counted = [
            {**batch, "labels": counted_labels(batch)} if "labels" in batch else batch
            for batch in batch_samples
        ]
        return super()._get_num_items_in_batch(counted, device)

    def _get_grad_norm(self, *args: Any, **keywords: Any) -> Any:
        norm = super()._get_grad_norm(*args, **keywords)  # type: ignore[no-untyped-call]
        self._record.grad_norm = None if norm is None else float(norm)
        return norm

    def _set_signature_columns_if_needed(self) -> None:
        """Columns of a data set that reach the collator: also those that only the engine knows."""
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        columns += [name for name in ENGINE_COLUMNS if name not in columns]

    # Around training ------------------------------------------------------------------------------

    def train(self, *args: Any, **keywords: Any) -> Any:
        """Train through the engine; see :class:`ResumableTrainer`."""
        reason, began = "error", time.perf_counter()
        try:
            output = super().train(*args, **keywords)
            reason = "done"
        except Interrupted as interrupted:
            reason = interrupted.reason
            raise
        finally:
            if self.observer is not None:
                seconds = time.perf_counter() - began
                self.observer.on_end({"reason": reason, "seconds": seconds})
        return output

    def _checkpoint_saved(self, path: Path, seconds: float, num_bytes: int) -> None:
        if self.observer is not None:
            step = self.state.global_step
            record = {"step": step, "path": str(path), "seconds": seconds, "bytes": num_bytes}
            self.observer.on_save(record)

    def _run_info(self) -> dict[str, Any]:
        parameters = list(self.model.parameters())
        return {
            "model": getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__,
            "num_parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "context": self.context,
            "max_steps": self.state.max_steps,
            "metric_for_best_model": self.args.metric_for_best_model,
            "config": in_json(self.oomb_config),
            "resumed_from_step": self.state.global_step if self._resumed is not None else None,
        }


class _Reports(TrainerCallback):
    """Tells the observer what the trainer's events say."""

    def __init__(self, trainer: EngineTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._trainer.observer is not None:
            self._trainer.observer.on_start(self._trainer._run_info())

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._record = StepRecord(self._trainer._data_seconds)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer._record.learning_rate = self._trainer._get_learning_rate()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        record = trainer._record.of_ranks(trainer.job, trainer.replicas)
        if trainer.observer is not None:
            trainer.observer.on_step(
                record.finished(trainer.state.global_step, trainer.state.epoch)
            )

    def on_evaluate(self, *_: Any, **keywords: Any) -> None:
        trainer, metrics = self._trainer, keywords["metrics"]
        tokens = sum(trainer.replicas.collect(lambda: trainer._evaluated_tokens))
        if trainer.observer is None:
            return
        record: dict[str, Any] = {"step": trainer.state.global_step}
        if tokens:  # TRL's losses count none
            record["tokens"] = tokens
        # The stock trainer's is the prefix and no more; longer ones are a user's own metrics.
        runtimes = [name for name in metrics if name.endswith("_runtime")]
        prefix = min(runtimes, key=len, default="eval_runtime").removesuffix("_runtime")
        if prefix != "eval":  # one of several sets, or one that the caller has named
            record["name"] = prefix
        for key, name in (("loss", f"{prefix}_loss"), ("seconds", f"{prefix}_runtime")):
            if name in metrics:
                record[key] = metrics[name]
        trainer.observer.on_eval(record)


class Trainer(EngineTrainerMixin):
    """``transformers.Trainer`` through the engine.

    trainer = oomb.hf.Trainer(model, args, train_dataset=..., oomb_config=oomb.Config())
    trainer.train()
    """
