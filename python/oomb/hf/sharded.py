"""A Trainer whose weights are shards on the ranks of a sequence: made, saved and loaded whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oomb.checkpoint.rows import expect_rows
from oomb.engine.ranks import shard_model
from oomb.hf.ranks import RanksTrainer
from oomb.parallel.handed_out import from_first
from oomb.parallel.whole import expect_room, gathered, is_sharded, loading_whole

# Their update of a value looks at that value's gradient and states alone.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "nadam")


class ShardedTrainer(RanksTrainer):
    """A RanksTrainer that can shard its model, and takes one that is sharded.

    Weights are whole in files, and each rank writes its rows of the optimizer's state: a run goes
    on with another number of ranks.

    Attributes:
        shard_weights: whether the ranks of a sequence share the weights.
    """

    model: Any
    shard_weights = False
    _whole_weights: dict[str, Any] | None = None
    _is_gathering = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._will_shard:  # TRL would have it bring a reference whole to each device
            self.accelerator.device_placement = False

    @property
    def _has_shards(self) -> bool:
        return is_sharded(self.model)

    @property
    def _will_shard(self) -> bool:
        return self.shard_weights and self.replicas.mesh is not None

    def _shard(self) -> None:
        """Shard the model where that is asked for and not done.

        Raises:
            ValueError: settings that shards do not allow.
            CheckpointError: this torch cannot save their optimizer's state.
        """
        if not (self._will_shard or self._has_shards):
            return
        expect_rows()
        if getattr(self, "optimizer_states", "device") == "host":
            raise ValueError(
                "optimizer_states: expected 'device' beside sharded weights, got 'host'"
            )
        if getattr(self.accelerator, "scaler", None) is not None:
            raise ValueError(
                "fp16: expected bf16 or neither beside sharded weights, got True: its gradient "
                "scaler would look at each rank's shards alone"
            )
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if self.optimizer is None and optimizer not in ELEMENTWISE:
            raise ValueError(
                f"optim: expected one of {', '.join(ELEMENTWISE)} beside sharded weights, got "
                f"{optimizer!r}, which looks at more than a rank's shard"
            )
        if self._has_shards:
            return
        if self.optimizer is not None:  # shards are parameters of their own
            raise ValueError(
                "optimizers: expected no optimizer beside shard_weights=True, got "
                f"{type(self.optimizer).__name__} of the whole weights, which would train nothing; "
                "make one by optim or optimizer_cls_and_kwargs, or pass a model that is sharded"
            )
        with from_first(self.model, self.job, self.args.device):
            shard_model(self.model, self.replicas.mesh)

    def _has_mixed_mesh_grads(self, *_: Any, **__: Any) -> bool:
        """False: the accelerator's clipping knows shards and whole gradients."""
        return False

    # Files ----------------------------------------------------------------------------------------

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """All ranks enter; inside, rank 0 may save the model by itself.

        It has the whole weights in the host's memory then.
        """
        if self._is_gathering or not self._has_shards:
            yield
            return
        self._is_gathering = True
        try:
            state = self.accelerator.unwrap_model(self.model).state_dict()
            self._whole_weights = self._gathered(state)
            yield
        finally:
            self._is_gathering, self._whole_weights = False, None

    def save_model(self, *args: Any, **keywords: Any) -> None:
        """As the stock trainer's; every rank calls it."""
        with self.whole_weights():
            super().save_model(*args, **keywords)

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Whole on rank 0; an error of one is raised by all."""
        self.job.together(lambda: expect_room(state))
        return self.job.together(lambda: gathered(state, keep=self.job.is_first))

    def _load_from_checkpoint(self, *args: Any, **keywords: Any) -> None:
        with loading_whole(self.model):
            super()._load_from_checkpoint(*args, **keywords)

    def _load_best_model(self) -> None:
        with loading_whole(self.model):
            super()._load_best_model()
