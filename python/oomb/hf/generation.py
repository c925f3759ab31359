"""TRL's generating trainers in processes that share each sequence: one of them asks the world.

The first process generates, calls tools and judges; what it found, what it noted for the logs and
where its random generators stand then goes to all. So each takes the same steps with the same
completions, rewards and shuffles, and nothing outside is asked twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from oomb.hf.random_state import random_state, restore_random_state
from oomb.hf.ranks import RanksTrainer

T = TypeVar("T")

# What generation and rewards leave in TRL's trainers besides what they return.
_NOTES = ("_metrics", "_pending_extra_logs", "_pending_metrics")


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Inside, accelerate takes this process for the only one.

    TRL gathers rewards, completions and columns of the log by functions of accelerate's, past the
    accelerator that knows who shares a sequence; so may functions of the user's. All of them ask
    this one state.
    """
    state = PartialState._shared_state
    alone = {"distributed_type": DistributedType.NO, "num_processes": 1}
    before = {name: state[name] for name in alone}
    state.update(alone)
    try:
        yield
    finally:
        state.update(before)


class GeneratesOnce(RanksTrainer):
    """Put before a trainer of TRL that generates: the processes of one sequence count as one."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        args: Any = self.args
        if self.replicas.number > 1:
            raise ValueError(
                "parallelism_config: expected None, so that all processes share each completion, "
                f"got {self.replicas.number} groups of them: one process generates for all"
            )
        if self.job.size > 1:
            self._count_as_one(args)

    def _count_as_one(self, args: Any) -> None:
        """Completions of a generation, of which TRL has counted one batch for each process."""
        counted = args.generation_batch_size
        batch = args.per_device_train_batch_size * args.steps_per_generation
        args.generation_batch_size = batch
        if self.job.is_first:
            warnings.warn(
                f"generation_batch_size: {batch} completions are generated at a time, where TRL "
                f"counted {counted}: {self.job.size} processes share each of them. Raise "
                "steps_per_generation or per_device_train_batch_size for more",
                stacklevel=2,
            )

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """TRL's own. A resumed run is where it was within a generation, which is sampled again."""
        trainer: Any = self
        if trainer._buffered_inputs is None:  # TRL counts from 0
            trainer._step = self.state.global_step * self.args.gradient_accumulation_steps
        return super().training_step(*args, **keywords)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's own. All processes take part: the engine answers for the model."""
        stock: Any = super()
        with _as_one_process():
            return stock._generate_and_score_completions(inputs)

    def _generate(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own, with tools and rollouts, on the first process."""
        stock: Any = super()
        return self._by_first(lambda: stock._generate(*args, **keywords))

    def _calculate_rewards(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own, on the first process; [completions, functions]."""
        stock: Any = super()
        found: torch.Tensor = self._by_first(
            lambda: stock._calculate_rewards(*args, **keywords).cpu()
        )
        return found.to(self.args.device)

    def _by_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returned on the first process, which alone does it; its error is raised
        by all."""
        trainer: Any = self

        def noted() -> tuple[T, dict[str, Any], int, dict[str, Any]]:
            found = work()
            notes = {name: getattr(trainer, name) for name in _NOTES}
            seen = trainer.state.num_input_tokens_seen
            return found, notes, seen, random_state(trainer.args.device)

        found, notes, seen, random = self.job.by_first(noted)
        if not self.job.is_first:
            vars(trainer).update(notes)
            trainer.state.num_input_tokens_seen = seen
            restore_random_state(random, trainer.args.device)
        return found
