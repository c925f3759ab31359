"""Exact match: does the model's likeliest answer equal the answer, word for word?

All words of an answer are judged in one pass. If each is the likeliest after the true ones before
it, greedy decoding would write exactly this answer; if one is not, it would not.
"""

from __future__ import annotations

import torch
from transformers import Qwen2ForCausalLM

import oomb

from .data import Batch, Data
from .tasks import IGNORED
from .training import autocast


def exact_match(
    model: Qwen2ForCausalLM,
    config: oomb.Config,
    data: Data,
    task: str,
    *,
    length: int,
    number: int,
    batch: int,
) -> float:
    """Share of ``number`` sequences of ``length`` tokens whose answers are all right."""
    right = 0
    with oomb.Engine(model, config) as engine:
        for asked in data.asked(task, number, length, batch):
            right += _right(model, engine, asked)
    return right / number


def _right(model: Qwen2ForCausalLM, engine: oomb.Engine, batch: Batch) -> int:
    labels = batch.labels
    found = labels.new_full(labels.shape, IGNORED)  # at a token: what was foretold for it
    first = int((labels != IGNORED).nonzero()[:, 1].min())

    def keep(begin: int, logits: torch.Tensor) -> None:
        end = min(begin + logits.shape[1], labels.shape[1] - 1)
        if end > first - 1:
            likeliest = logits[:, : end - begin].argmax(-1).cpu()
            found[:, begin + 1 : end + 1] = likeliest

    ids = batch.input_ids.to(model.device)
    with autocast(model):
        engine.evaluate(ids, ids, on_logits=keep)
    return int(((found == labels) | (labels == IGNORED)).all(dim=1).sum())
