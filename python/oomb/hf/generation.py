"""TRL's generating trainers in processes that share each sequence: one of them asks the world.

The first process of each group generates, calls tools and judges; what it found, what it noted for
the logs and where its random generators stand then goes to the others of its group. So each of them
takes the same steps with the same completions, rewards and shuffles, and nothing outside is asked
twice. What TRL gathers among processes is gathered among groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, operations, recursively_apply
from transformers import set_seed
from trl.trainer.utils import RepeatSampler

from oomb.engine.lent import on_first
from oomb.hf.random_state import random_state, restore_random_state
from oomb.hf.ranks import RanksTrainer
from oomb.hf.step_layout import StepLayout
from oomb.parallel.group import PATIENCE
from oomb.parallel.replicas import Replicas

T = TypeVar("T")

# What generation and rewards leave in TRL's trainers besides what they return.
_NOTES = ("_metrics", "_pending_extra_logs", "_pending_metrics")


@contextmanager
def _groups_as_processes(replicas: Replicas) -> Iterator[None]:
    """Inside, accelerate takes each group for one process; a lone one for the only process.

    TRL gathers rewards, completions and columns of the log by functions of accelerate's, past the
    accelerator that knows who shares a sequence; so may functions of the user's. All of them ask
    one state, and come to the same two exchanges.
    """
    state: dict[str, Any] = PartialState._shared_state
    if replicas.number == 1:
        counted = {"distributed_type": DistributedType.NO, "num_processes": 1}
    else:
        counted = {"num_processes": replicas.number}
        if replicas.place == 0:  # the others, who judge nothing, must not pass for the first
            counted["process_index"] = replicas.own

    def gather(tensors: Any) -> Any:
        return recursively_apply(replicas.gather, tensors, error_on_other_type=True)

    def gather_object(given: Any) -> list[Any]:
        return [one for part in replicas.collect(lambda: given) for one in part]

    exchanges = {"_gpu_gather": gather, "_gpu_gather_object": gather_object}
    counted_before = {name: state[name] for name in counted}
    exchanges_before = {name: getattr(operations, name) for name in exchanges}
    state.update(counted)
    vars(operations).update(exchanges)
    try:
        yield
    finally:
        vars(operations).update(exchanges_before)
        state.update(counted_before)


class _PromptsOfEpoch(RepeatSampler):
    """TRL's order of prompts, found again: it draws one epoch's after another from one seed."""

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            assert self.seed is not None
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class GeneratesOnce(RanksTrainer):
    """Put before a trainer of TRL that generates: the processes of one sequence count as one."""

    patience = PATIENCE  # a group may generate, and ask the world, far longer than another

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.replicas.sharing > 1:
            self._count_groups(self.args)

    def _count_groups(self, args: Any) -> None:
        """Completions of a generation, of which TRL has counted one batch for each process."""
        counted, replicas = args.generation_batch_size, self.replicas
        batch = args.per_device_train_batch_size * args.steps_per_generation * replicas.number
        args.generation_batch_size = batch
        if self.job.is_first:
            warnings.warn(
                f"generation_batch_size: {batch} completions are generated at a time, where TRL "
                f"counted {counted}: {replicas.sharing} processes share each of them. Raise "
                "steps_per_generation or per_device_train_batch_size for more",
                stacklevel=2,
            )

    def _layout(self) -> StepLayout:
        stock: Any = super()
        args: Any = self.args
        divided: StepLayout = stock._layout()
        return replace(divided, completions=args.generation_batch_size)

    def _get_train_sampler(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own; a resumed run has the order of its epoch."""
        stock: Any = super()
        sampler = stock._get_train_sampler(*args, **keywords)
        if type(sampler) is RepeatSampler:
            sampler.__class__ = _PromptsOfEpoch
        return sampler

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """TRL's own. A resumed run is where it was within a generation, which is sampled again."""
        trainer: Any = self
        if trainer._buffered_inputs is None:  # TRL counts from 0
            trainer._step = self.state.global_step * self.args.gradient_accumulation_steps
        return super().training_step(*args, **keywords)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's own. All processes take part: the engine answers for the model."""
        stock: Any = super()
        with _groups_as_processes(self.replicas), self._drawing_by_group():
            return stock._generate_and_score_completions(inputs)

    @contextmanager
    def _drawing_by_group(self) -> Iterator[None]:
        """Inside, each group draws numbers of its own; after it all draw alike again.

        So no two groups write the same completions, and a checkpoint has one random state.
        """
        if self.replicas.number == 1:
            yield
            return
        device = self.args.device

        def drawn() -> tuple[int, dict[str, Any]]:
            return int(torch.randint(2**31, ())), random_state(device)

        seed, after = self.replicas.by_first(lambda: self.replicas.collect(drawn)[0])
        set_seed(seed + self.replicas.own)
        try:
            yield
        finally:
            restore_random_state(after, device)

    def _generate(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own, with tools and rollouts, on the first process of each group."""
        stock: Any = super()
        return self._by_first(lambda: stock._generate(*args, **keywords), runs_model=True)

    def _calculate_rewards(self, *args: Any, **keywords: Any) -> Any:
        """TRL's own, on the first process of each group; [completions of all, functions]."""
        stock: Any = super()
        found: torch.Tensor = self._by_first(
            lambda: stock._calculate_rewards(*args, **keywords).cpu()
        )
        return found.to(self.args.device)

    def _by_first(self, work: Callable[[], T], *, runs_model: bool = False) -> T:
        """What ``work`` returned on the first process of the group, which alone does it; its error
        is raised by all.

        Args:
            runs_model: the others lend it their shards.
        """
        trainer: Any = self

        def noted() -> tuple[T, dict[str, Any], int, dict[str, Any]]:
            found = work()
            notes = {name: getattr(trainer, name) for name in _NOTES}
            seen = trainer.state.num_input_tokens_seen
            return found, notes, seen, random_state(trainer.args.device)

        told: Callable[[], Any] = noted
        if runs_model and trainer._has_shards:
            at_once = trainer.args.ds3_gather_for_generation  # TRL's name for the same choice
            done = on_first(trainer.engine, self.replicas.sharers, noted, at_once=at_once)
            told = lambda: done  # noqa: E731
        found: T
        found, notes, seen, random = self.replicas.by_first(told)
        if self.replicas.place > 0:
            vars(trainer).update(notes)
            trainer.state.num_input_tokens_seen = seen
            restore_random_state(random, trainer.args.device)
        return found
