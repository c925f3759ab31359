"""Batches of the tasks, a function of (seed, step): what is trained on, and what is asked."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from oomb.cli.demo_text import Text, python_source

from .tasks import IGNORED, TASKS, Problem, Tokens, composed, many_needles

_TEXT = 0.1  # weight of all bytes of the text, where all tokens of answers have 1; facts have none


@dataclass(frozen=True)
class Batch:
    """Sequences of one length; ``labels`` are those of answers alone, ``weights`` of all tokens."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


@functools.cache
def _source() -> Text:
    """Read once in a process."""
    return python_source()


class Data:
    """Training batches from the library's source, evaluation on files that are held out."""

    def __init__(self, seed: int) -> None:
        text = _source()
        self._train = text.train.numpy().astype(np.int64)
        self._held_out = text.held_out.numpy().astype(np.int64)
        self._seed = seed

    def training(self, step: int, batch: int, length: int, share: float, others: int = 1) -> Batch:
        """``others`` of four sequences have a task of each kind in turn, the rest many needles."""
        random = np.random.default_rng([self._seed, 1, step])
        problems = []
        for row in range(step * batch, (step + 1) * batch):
            problem = many_needles(random, length, share * random.uniform(0.3, 1.0))
            if row % 4 >= 4 - others:
                other = list(TASKS.values())[row // 4 % len(TASKS)](random)
                if other.tokens <= length:
                    problem = other
            problems.append(problem)
        return self._batch(problems, self._train, length, random)

    def asked(self, task: str, number: int, length: int, batch: int) -> list[Batch]:
        """``number`` sequences with a question each, in batches."""
        random = np.random.default_rng([self._seed, 2, length, list(TASKS).index(task)])
        problems = [TASKS[task](random) for _ in range(number)]
        parts = [problems[i : i + batch] for i in range(0, number, batch)]
        return [self._batch(part, self._held_out, length, random) for part in parts]

    def _batch(
        self, problems: list[Problem], text: Tokens, length: int, random: np.random.Generator
    ) -> Batch:
        if len(text) < length:
            text = np.tile(text, -(-length // len(text)))
        rows = [composed(problem, text, length, random) for problem in problems]
        tokens = torch.from_numpy(np.stack([row for row, _ in rows]))
        counted = torch.from_numpy(np.stack([row for _, row in rows]))
        labels = tokens.masked_fill(~counted, IGNORED)
        # A share of the loss that length does not change: at 16K a fixed weight of a byte that is
        # right at 128 gives the text most of it.
        of_text = tokens < 256
        byte = _TEXT * int(counted.sum()) / max(1, int(of_text.sum()))
        weights = torch.where(of_text, byte, 0.0).masked_fill(counted, 1.0)
        return Batch(tokens, labels, weights)
