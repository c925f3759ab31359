"""TRL's SFTTrainer, stock and through the engine: losses, gradients and metrics in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch.nn import functional as F

import oomb
import oomb.hf
from engine.models import make
from engine.reference import EXACT, random_ids, shifted

from .runs import CONFIG, prompts
from .test_two_pass import compare, plain_log_softmax, settings  # noqa: F401  # a fixture


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_losses_and_metrics(loss_type: str, tmp_path: Path) -> None:
    """Of training and evaluation."""

    def args() -> Any:
        given = settings(tmp_path, per_device_train_batch_size=2, eval_strategy="steps")
        del given["disable_dropout"]
        return trl.SFTConfig(**given, eval_steps=1, loss_type=loss_type, max_length=64)

    others = {"eval_dataset": prompts(4)}
    compare(trl.SFTTrainer, oomb.hf.SFTTrainer, args, prompts(8), adapted=False, **others)


def test_metrics_of_a_call() -> None:
    model, ids = make("qwen3"), random_ids(2, 61)
    labels = ids.clone()
    labels[0, :20] = labels[1, 55:] = -100
    targets = shifted(labels)
    counted = targets != -100
    with torch.no_grad():
        logp = F.log_softmax(model(ids, use_cache=False).logits, -1)[counted]
    expected = {
        "entropy": float(-(logp.exp() * logp).sum(-1).mean()),
        "accuracy": float((logp.argmax(-1) == targets[counted]).double().mean()),
    }
    with oomb.Engine(model, CONFIG) as engine:
        for step in (
            engine.forward_backward(ids, labels, token_metrics=True),
            engine.evaluate(ids, labels, token_metrics=True),
            engine.evaluate(ids, labels, token_metrics=True, on_logits=lambda *_: None),
        ):
            assert step.metrics == pytest.approx(expected, rel=EXACT)
        assert engine.evaluate(ids, labels).metrics == {}
