"""TRL's preference and policy trainers through the engine, in two passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from trl.trainer.dpo_trainer import DPOTrainer as StockDPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer as StockGRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer as StockKTOTrainer
from trl.trainer.reward_trainer import RewardTrainer as StockRewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer as StockRLOOTrainer

from oomb.config import Dense
from oomb.engine.engine import Engine
from oomb.engine.ranks import shard_model
from oomb.hf.evaluation import EvaluatingTrainer
from oomb.hf.fused_head import FusedHead
from oomb.hf.generation import GeneratesOnce
from oomb.hf.last_token import LastToken
from oomb.hf.refusals import refuse_generation, refuse_of_two_passes
from oomb.hf.resumable import ResumableTrainer
from oomb.hf.trainer import EngineTrainerMixin
from oomb.parallel.handed_out import from_first
from oomb.parallel.whole import is_sharded
from oomb.results import Progress, Step


class TwoPassTrainerMixin(EngineTrainerMixin):
    """Put before a trainer of TRL whose loss is a function of tokens' log-probabilities.

    Its own ``compute_loss`` runs unchanged: where it asks the model for log-probabilities and
    entropies it gets those of the engine, and after its backward the engine sweeps. A reference
    model is run by an engine of its own. Data, generation, rewards and metrics stay TRL's.
    """

    _heads: list[FusedHead]
    _reference: Engine | None = None

    def _shard(self) -> None:
        """The reference too, which like the model may be on the meta device on later ranks."""
        shares = self._will_shard or self._has_shards
        if shares and getattr(self.args, "sync_ref_model", False):
            raise ValueError(
                "sync_ref_model: expected False beside sharded weights, got True: checkpoints "
                "keep a reference that moves, whole"
            )
        super()._shard()
        reference = self.ref_model
        if reference is None or not self._will_shard or is_sharded(reference):
            return
        reference = self.accelerator.unwrap_model(reference, keep_fp32_wrapper=False)
        with from_first(reference, self.job, self.args.device):
            shard_model(reference, self.replicas.mesh)

    def _refuse_loss(self) -> None:
        refuse_of_two_passes(self)

    def _build_engine(self) -> None:
        super()._build_engine()
        if self._reference is not None:
            self._reference.close()
            self._reference = None
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self._heads = [self._head(model, self.engine)]
        reference: Any = getattr(self, "ref_model", None)
        if reference is not None:
            reference = self.accelerator.unwrap_model(reference, keep_fp32_wrapper=False)
            self._reference = Engine(reference, self.oomb_config, mesh=self.replicas.mesh)
            self._heads.append(self._head(reference, self._reference))

    def _head(self, model: Any, engine: Engine) -> FusedHead:
        causal = model.get_base_model() if hasattr(model, "peft_config") else model
        answers = LastToken if isinstance(self, StockRewardTrainer) else FusedHead
        return answers(
            causal,
            engine,
            float(getattr(self, "temperature", 1.0)),
            self._statistics(),
            self.accelerator.autocast,
            self._training_progress,
        )

    def _statistics(self) -> tuple[str, ...]:
        """Constants that the trainer's metrics, or the weights of its loss, are made of."""
        if isinstance(self, StockDPOTrainer):
            return ("mean_logits", "is_top1", "log_sum_sq_probs")
        return ("mean_logits",) if isinstance(self, StockKTOTrainer) else ()

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """TRL's own, then the sweep; 0-d tensor."""
        self._check_signals()
        with self.replicas.step(), self._answering():
            # Past EngineTrainerMixin's, which computes a loss of its own.
            loss: torch.Tensor = super(ResumableTrainer, self).training_step(*args, **keywords)
            for tokens, stats in self._heads[0].sweep():
                step = Step(loss=loss, num_valid_tokens=tokens, stats=stats)
                self._record.add(step, loss / self.replicas.number, tokens)
            if self.accelerator.sync_gradients:
                parameters = self.model.parameters()
                self.replicas.add_gradients([p for p in parameters if p.requires_grad])
        return loss

    @contextmanager
    def _answering(self) -> Iterator[None]:
        with ExitStack() as stack:
            sharded = [x for x in (self.model, self.ref_model) if x is not None and is_sharded(x)]
            for asked in sharded:
                from oomb.parallel.fsdp_hooks import hooks_aside  # FSDP2 is for those who use it

                stack.enter_context(hooks_aside(asked))
            for head in self._heads:
                stack.enter_context(head.answering())
            yield

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """TRL's own."""
        self._check_signals()
        with self.replicas.step(), self._answering():
            return super(ResumableTrainer, self).prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own, as :meth:`prediction_step` is."""
        return super(EvaluatingTrainer, self).evaluation_loop(*args, **keywords)


def _unheard(progress: Progress) -> None:
    """No step is under way that an observer could be told of."""


_NO_LOGITS = "beside sharded weights, which are gathered for no call that returns logits"


class _ReferenceFirst(TwoPassTrainerMixin):
    """Asks the reference before the model that trains, whose pages then stay for its sweep.

    TRL does so itself where references are computed ahead of training; the same code runs here.
    Engines answer all that TRL asks the models, so both may be sharded.
    """

    _reference_columns: tuple[str, str]

    def _shard(self) -> None:
        shares = self._will_shard or self._has_shards
        if shares and self.compute_metrics is not None:
            raise ValueError(f"compute_metrics: expected None {_NO_LOGITS}, got one")
        super()._shard()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """TRL's own.

        Raises:
            ValueError: logits are asked for, and weights are sharded.
        """
        if self._has_shards and not prediction_loss_only:
            raise ValueError(f"prediction_loss_only: expected True {_NO_LOGITS}, got False")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _precompute_ref_logps(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own, answered by an engine that is there for its length: TRL does this while
        the trainer is made, before the engine of training.

        Raises:
            ValueError: weights are kept on the host, which one engine at a time can do; or there
                are several processes, which need not see the file that TRL's first one writes.
        """
        if self.job.size > 1:
            raise ValueError(
                f"precompute_ref_log_probs: expected False in {self.job.size} processes, got True: "
                "TRL keeps these values in a file that other processes need not see"
            )
        if self._keeps_weights_on_host:
            raise ValueError(
                "precompute_ref_log_probs: expected False beside weights='host', got True: an "
                "engine of its own computes them"
            )
        stock: Any = super()
        trainer: Any = self
        of_model, told = trainer._precompute_model_hash, trainer.args
        # TRL finds values by data and weights alone, in a cache that outlives the process.
        config = self.oomb_config
        pages = None if config.attention == Dense() else (config.chunk_size, config.page_size)
        ld_alpha = getattr(told, "ld_alpha", None)
        depends = (config.attention, pages, told.bf16, told.max_length, ld_alpha)
        reference = getattr(self, "ref_model", None)
        asked = self.model if reference is None else reference
        model: Any = self.accelerator.unwrap_model(asked, keep_fp32_wrapper=False)
        with ExitStack() as stack:
            if hasattr(self, "_heads"):
                head = self._heads[0 if reference is None else 1]
            else:
                engine = Engine(model, self.oomb_config)
                stack.callback(engine.close)
                causal = model.get_base_model() if hasattr(model, "peft_config") else model
                head = FusedHead(causal, engine, 1.0, (), self.accelerator.autocast, _unheard)
            stack.enter_context(head.answering())
            stack.callback(setattr, self, "_precompute_model_hash", of_model)
            trainer._precompute_model_hash = f"{of_model} {depends!r}"
            return stock._precompute_ref_logps(*args, **keywords)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        trainer: Any = self
        if trainer.precompute_ref_logps:
            computed: Any = super()
            return computed._compute_loss(model, inputs, return_outputs)
        reference = self.model if trainer.ref_model is None else trainer.ref_model
        found = trainer.compute_ref_log_probs(reference, inputs)
        inputs = {**inputs, **dict(zip(self._reference_columns, found, strict=True))}
        trainer.precompute_ref_logps = True
        try:
            stock: Any = super()
            return stock._compute_loss(model, inputs, return_outputs)
        finally:
            trainer.precompute_ref_logps = False


class DPOTrainer(_ReferenceFirst, StockDPOTrainer):
    """``trl.DPOTrainer`` through the engine, with any of its losses."""

    _reference_columns = ("ref_chosen_logps", "ref_rejected_logps")


class KTOTrainer(_ReferenceFirst, StockKTOTrainer):
    """``trl.KTOTrainer`` through the engine."""

    _reference_columns = ("ref_logps", "ref_KL_logps")


class _Generates(GeneratesOnce, TwoPassTrainerMixin):
    def _shard(self) -> None:
        kind = getattr(self.args, "cache_implementation", None)
        shares = self._will_shard or self._has_shards
        if shares and kind is not None and self.oomb_config.sharded_weights == "zero3":
            raise ValueError(
                f"cache_implementation: expected None beside sharded_weights='zero3', got {kind!r}:"
                " transformers may compile what it generates with, whose layers are gathered one "
                "by one; take 'zero2'"
            )
        super()._shard()

    def _refuse_ranks(self, named: Mapping[str, Any]) -> None:
        refuse_generation(named)


class GRPOTrainer(_Generates, StockGRPOTrainer):
    """``trl.GRPOTrainer`` through the engine; it generates as TRL does."""

    def _own_state(self) -> dict[str, Any]:
        """Of the controller of ``use_adaptive_entropy``."""
        return {name: getattr(self, name) for name in self._controlled}

    def _take_own_state(self, state: dict[str, Any]) -> None:
        for name in self._controlled:
            if name in state:
                setattr(self, name, state[name])

    @property
    def _controlled(self) -> tuple[str, ...]:
        adapts = getattr(self, "use_adaptive_entropy", False)
        return ("entropy_coef", "_last_world_entropy") if adapts else ()


class RLOOTrainer(_Generates, StockRLOOTrainer):
    """``trl.RLOOTrainer`` through the engine; it generates as TRL does."""


class RewardTrainer(TwoPassTrainerMixin, StockRewardTrainer):
    """``trl.RewardTrainer`` through the engine; the model is a sequence classifier."""
