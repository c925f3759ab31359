"""A transformers Trainer in several processes: which share a sequence, who speaks for them.

accelerate keeps what it knows of the job: the process group, the device, who is first. It is kept
from three things that belong to other ways of training. It does not wrap the model (the engine
needs the model itself, and adds gradients). It does not cut sequences (each rank of a sequence gets
the whole batch). And it counts replicas where it would count processes: batches go to replicas, and
what it gathers has one part of each.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from oomb.parallel.group import TIMEOUT
from oomb.parallel.job import Job, ranks_in_job
from oomb.parallel.replicas import Replicas
from oomb.parallel.whole import clip_shards

_IN_ENVIRONMENT = "ACCELERATE_USE_PARALLELISM_CONFIG"
_FSDP_IN_ENVIRONMENT = "ACCELERATE_USE_FSDP"


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator to which a replica is one process; made of one that knows no replicas."""

    replicas: Replicas

    @property
    def num_processes(self) -> int:
        return self.replicas.number

    @property
    def process_index(self) -> int:
        return self.replicas.own

    def prepare_model(self, model: Any, *args: Any, **keywords: Any) -> Any:
        """On its device, under autocast, and not wrapped."""
        keywords["evaluation_mode"] = True
        return super().prepare_model(model, *args, **keywords)

    def gather(self, tensor: Any) -> Any:
        """Of a tensor, or of each in a structure of them, a part of each replica.

        A lone replica asks nobody, as one process does: it may be here with one of its ranks.
        """
        return recursively_apply(self.replicas.gather, tensor)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Of this replica's share of the mean over replicas, to which their gradients add up."""
        super().backward(loss / self.replicas.number, **keywords)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``"sum"``, ``"mean"`` or ``"max"`` over the same parts; ``scale`` is for XLA alone."""

        def of_parts(part: torch.Tensor) -> torch.Tensor:
            parts: torch.Tensor = self.gather(part[None])
            if reduction == "max":
                return parts.amax(0)
            total = parts.sum(0, dtype=part.dtype)
            return total / self.replicas.number if reduction == "mean" else total

        return recursively_apply(of_parts, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Likewise of objects: one rank of each replica gives its own."""
        if use_gather_object and self.replicas.place > 0:
            input_data = []
        return super().gather_for_metrics(input_data, use_gather_object)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Of gradients that may be shards; the norm is that of all ranks."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not any(isinstance(p.grad, DTensor) for p in parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_shards(parameters, max_norm, norm_type)


class RanksTrainer(transformers.Trainer):
    """A Trainer that one process runs, or the ranks of a job together.

    Rank 0 prints, logs and saves. All ranks take the same steps.

    Attributes:
        job: all ranks.
        replicas: which of them share a sequence.
        patience: how long one replica may wait for another.
    """

    job: Job
    replicas: Replicas
    patience: timedelta = TIMEOUT

    def create_accelerator_and_postprocess(self) -> None:
        self.job = Job()
        sharing = sharing_of(self.args)
        before, self.args.parallelism_config = self.args.parallelism_config, None
        _refuse_fsdp_environment()
        in_environment = os.environ.pop(_IN_ENVIRONMENT, None)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.parallelism_config = before
            if in_environment is not None:
                os.environ[_IN_ENVIRONMENT] = in_environment
        self.replicas = Replicas(self.job.size, sharing, self.args.device, self.patience)
        if self.job.size > 1:
            accelerator: Any = self.accelerator
            accelerator.__class__ = ReplicaAccelerator
            accelerator.replicas = self.replicas
            # One process would read for all, in a way that knows processes alone.
            accelerator.dataloader_config.dispatch_batches = False

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Sequences of an optimizer step, of all replicas."""
        return super().get_total_train_batch_size(args) // self.replicas.sharing

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's share of a sequence's; the stock trainer adds those of all processes."""
        return int(super().floating_point_ops(inputs)) // self.replicas.sharing


def _refuse_fsdp_environment() -> None:
    if os.environ.get(_FSDP_IN_ENVIRONMENT, "").lower() in ("true", "1", "yes"):
        raise ValueError(
            f"{_FSDP_IN_ENVIRONMENT}: expected unset, got "
            f"{os.environ[_FSDP_IN_ENVIRONMENT]!r} (use_fsdp of accelerate's configuration, and "
            "FSDP_… beside it): accelerate would wrap the model. Choose MULTI_GPU in accelerate "
            "config and pass shard_weights=True: the ranks of a sequence shard weights by FSDP2 "
            "as Config(sharded_weights=…) says"
        )


def sharing_of(args: TrainingArguments) -> int:
    """How many ranks share a sequence: as ``ParallelismConfig(cp_size=…)`` says; else all of them.

    Sizes of data parallelism without a ``cp_size`` say how many groups do so.

    Raises:
        ValueError: it asks for tensor parallelism, DeepSpeed's sequence parallelism, or for a
            number of ranks that the job does not have.
    """
    ranks = ranks_in_job()
    config: Any = args.parallelism_config
    if config is None and os.environ.get(_IN_ENVIRONMENT, "").lower() == "true":
        from accelerate.parallelism_config import ParallelismConfig  # not in every accelerate

        config = ParallelismConfig()
    if config is None:
        return ranks
    for name in ("tp_size", "sp_size"):
        if getattr(config, name, 1) != 1:
            raise ValueError(
                f"parallelism_config.{name}: expected 1, got {getattr(config, name)}: ranks share "
                "a sequence by its heads; give them as cp_size"
            )
    if config.cp_size == 1 < config.total_size and ranks % config.total_size == 0:
        return int(ranks // config.total_size)
    if config.total_size != ranks and config.total_size != config.cp_size:
        raise ValueError(
            f"parallelism_config: expected sizes whose product is the job's {ranks} processes, got "
            f"{config.total_size}"
        )
    if ranks % config.cp_size:
        raise ValueError(
            f"parallelism_config.cp_size: expected a divisor of the job's {ranks} processes, got "
            f"{config.cp_size}"
        )
    return int(config.cp_size)
