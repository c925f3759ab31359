"""How the sequences of an optimizer step are divided: a run may go on with another division.

An epoch has one order for all groups of ranks, and each step takes the next sequences of it. So the
number of steps says the place in the data, as long as each takes as many sequences as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import has_length

from oomb.checkpoint import CheckpointError


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """What an optimizer step is made of.

    Attributes:
        batch_size: sequences of a call.
        accumulation_steps: calls of a group.
        groups: of ranks that share sequences.
        completions: that all groups generate at a time; 0: none do.
    """

    batch_size: int
    accumulation_steps: int
    groups: int
    completions: int = 0

    @property
    def sequences(self) -> int:
        """Of all groups."""
        return self.batch_size * self.accumulation_steps * self.groups

    def __str__(self) -> str:
        return (
            f"batch size {self.batch_size} x accumulation {self.accumulation_steps} x "
            f"{self.groups} group{'' if self.groups == 1 else 's'}"
        )

    def as_state(self) -> dict[str, int]:
        """As a checkpoint keeps it."""
        return {
            "batch_size": self.batch_size,
            "calls_per_step": self.accumulation_steps * self.groups,
            "replicas": self.groups,
            "completions": self.completions,
        }

    def before(self, state: Mapping[str, Any]) -> StepLayout:
        """Of a checkpoint's state; what it does not say was as it is now."""
        groups = state.get("replicas", 1)
        return StepLayout(
            batch_size=state.get("batch_size", self.batch_size),
            accumulation_steps=state.get("calls_per_step", self.accumulation_steps) // groups,
            groups=groups,
            completions=state.get("completions", self.completions),
        )

    def expect_as_many(self, before: StepLayout, name: str) -> None:
        """Refuse a step of another number of sequences.

        Args:
            name: what the caller's settings call accumulation.

        Raises:
            CheckpointError: the place in the data would be another.
        """
        if self.sequences == before.sequences:
            return
        wanted, rest = divmod(before.sequences, self.batch_size * self.groups)
        expected = "another batch size or number of groups" if rest else wanted
        raise CheckpointError(
            f"{name}: expected {expected}, so that an optimizer step takes {before.sequences} "
            f"sequences as before ({before}), got {self.accumulation_steps}, which makes "
            f"{self.sequences} ({self})"
        )


def expect_same_order(trainer: Any, now: StepLayout, before: StepLayout) -> None:
    """Refuse settings by which another division changes the order of an epoch, or its length.

    Raises:
        CheckpointError: names the setting.
    """
    if now == before:
        return
    settings, data = trainer.args, trainer.train_dataset
    regrouped = now.groups != before.groups
    strategy = settings.train_sampling_strategy
    wrong = None
    if now.completions != before.completions:
        wanted = f"one that makes {before.completions} completions of a generation, as before,"
        wrong = "steps_per_generation", wanted, f"{now.completions} completions"
    elif strategy not in ("random", "sequential"):
        wrong = "train_sampling_strategy", "'random' or 'sequential'", repr(strategy)
    elif settings.dataloader_drop_last:
        wrong = "dataloader_drop_last", "False", "True"
    elif regrouped and not trainer.accelerator.use_seedable_sampler:
        wrong = "accelerator_config.use_seedable_sampler", "True", "False"
    elif regrouped and not has_length(data) and getattr(data, "num_shards", 1) > 1:
        wrong = "train_dataset", "one with a length, or of one shard", f"{data.num_shards} shards"
    if wrong is not None:
        name, expected, got = wrong
        raise CheckpointError(
            f"{name}: expected {expected} for a run that goes on with {now} ({before} before), got "
            f"{got}: sequences would come in another order"
        )
