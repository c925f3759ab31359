"""Metrics of an evaluation are the stock trainer's, though logits exist in slices only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import EvalPrediction

from oomb.core import loss as engine_loss
from oomb.hf import Trainer

from .runs import CONFIG, Example, arguments, logged, masked, model, packed


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Of predictions [rows, tokens] of the next token, and where in the rows they are right."""
    predictions, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    right = (predictions == labels) & (labels != -100)
    return {
        "accuracy": float(right.sum() / (labels != -100).sum()),
        "place": float((right * np.arange(labels.shape[1])).sum()),
    }


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape[:2] == labels.shape
    return logits.argmax(dim=-1)


def entropy(found: EvalPrediction) -> dict[str, float]:
    """Of whole logits, where there is a label."""
    logits = torch.from_numpy(found.predictions)[:, :-1]
    counted = torch.from_numpy(found.label_ids[:, 1:] != -100)
    logprobs = logits.log_softmax(-1)
    return {"entropy": float(-(logprobs.exp() * logprobs).sum(-1)[counted].mean())}


class Counted:
    """Accuracy over batches, as ``batch_eval_metrics`` asks for it."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def __call__(self, found: EvalPrediction, compute_result: bool) -> dict[str, float]:
        labels = found.label_ids[:, 1:]
        best = found.predictions[:, :-1].argmax(-1)
        self.right += int(((best == labels) & (labels != -100)).sum())
        self.all += int((labels != -100).sum())
        return {"accuracy": self.right / self.all} if compute_result else {}


def trained(kind: Any, folder: Path, data: list[Example], own: dict[str, Any]) -> Any:
    settings = own.pop("settings", {})
    if kind is Trainer:
        own["oomb_config"] = CONFIG
    trainer = kind(
        model(),
        arguments(folder, max_steps=4, eval_strategy="steps", eval_steps=2, **settings),
        train_dataset=data,
        eval_dataset=data[:5],
        **own,
    )
    trainer.train()
    return trainer


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "preprocessed": lambda: {
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": likeliest,
    },
    "whole": lambda: {"compute_metrics": entropy},
    "batches": lambda: {"compute_metrics": Counted(), "settings": {"batch_eval_metrics": True}},
}


@pytest.mark.parametrize("data", [packed, masked])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(3)
def test_metrics(
    way: str,
    data: Callable[[], list[Example]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With slices of eleven tokens, which no chunk is a multiple of."""
    monkeypatch.setattr(engine_loss, "slice_rows", lambda *_: 22)
    stock = trained(transformers.Trainer, tmp_path / "stock", data(), WAYS[way]())
    ours = trained(Trainer, tmp_path / "ours", data(), WAYS[way]())
    names = {name for log in stock.state.log_history for name in log if name.startswith("eval_")}
    names -= {n for n in names if n.endswith(("runtime", "per_second", "preparation_time"))}
    assert len(names) >= 2
    for name in sorted(names):
        expected = logged(stock, name)
        assert len(expected) == 2
        assert logged(ours, name) == pytest.approx(expected, rel=1e-5), name


def test_predict(tmp_path: Path) -> None:
    """Predictions are the stock trainer's, and so are their shapes."""
    rows = packed(5)
    for way in ("preprocessed", "whole"):
        outputs = []
        for kind, own in ((transformers.Trainer, {}), (Trainer, {"oomb_config": CONFIG})):
            outputs.append(kind(model(), arguments(tmp_path), **WAYS[way](), **own).predict(rows))
        stock, ours = outputs
        assert ours.predictions.dtype == stock.predictions.dtype
        np.testing.assert_allclose(ours.predictions, stock.predictions, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(ours.label_ids, stock.label_ids)
        assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)


def test_several_results_of_preprocessing(tmp_path: Path) -> None:
    def both(logits: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits.topk(3).values

    rows = packed(3)
    found = Trainer(
        model(), arguments(tmp_path), preprocess_logits_for_metrics=both, oomb_config=CONFIG
    ).predict(rows)
    best, highest = found.predictions
    assert best.shape == (3, 70) and highest.shape == (3, 70, 3)
    stock = transformers.Trainer(
        model(), arguments(tmp_path), preprocess_logits_for_metrics=both
    ).predict(rows)
    np.testing.assert_array_equal(best, stock.predictions[0])
    np.testing.assert_allclose(highest, stock.predictions[1], rtol=1e-4, atol=1e-5)


def test_rows_without_a_target(tmp_path: Path) -> None:
    rows = packed(4)
    for row in rows[:2]:
        row["labels"] = [-100] * len(row["labels"])
    trainer = Trainer(model(), arguments(tmp_path), **WAYS["preprocessed"](), oomb_config=CONFIG)
    found = trainer.predict(rows)
    expected = transformers.Trainer(model(), arguments(tmp_path), **WAYS["preprocessed"]()).predict(
        rows
    )
    np.testing.assert_array_equal(found.predictions, expected.predictions)


def test_under_autocast(tmp_path: Path) -> None:
    """Logits come in fp32, as the stock trainer gives them."""
    seen = set()

    def keep(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.add(logits.dtype)
        return logits.argmax(-1)

    settings = arguments(tmp_path, bf16=True)
    for kind, own in ((transformers.Trainer, {}), (Trainer, {"oomb_config": CONFIG})):
        kind(model(), settings, preprocess_logits_for_metrics=keep, **own).predict(packed(2))
        assert seen == {torch.float32}


def test_logits_that_are_too_large(tmp_path: Path) -> None:
    rows = packed(5)
    vocabulary = model().config.vocab_size
    batch = 2 * 70 * vocabulary * 4

    def trainer(**settings: Any) -> Trainer:
        made = Trainer(
            model(),
            arguments(tmp_path, **settings),
            compute_metrics=entropy if not settings else Counted(),
            eval_dataset=rows,
            oomb_config=CONFIG,
        )
        made.max_logit_bytes = 2 * batch - 1
        return made

    message = (
        f"^compute_metrics: expected logits of at most {2 * batch - 1} bytes, .*max_logit_bytes, "
        f"got {2 * batch} or more for the evaluation: pass preprocess_logits_for_metrics, .* or "
        "set batch_eval_metrics=True$"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            trainer().evaluate()
    assert "eval_accuracy" in trainer(batch_eval_metrics=True).evaluate()


def test_preprocessing_that_shifts(tmp_path: Path) -> None:
    """Slices do not know the token before them."""
    trainer = Trainer(
        model(),
        arguments(tmp_path),
        preprocess_logits_for_metrics=lambda logits, _: logits[:, :-1].argmax(-1),
        oomb_config=CONFIG,
    )
    message = r"^preprocess_logits_for_metrics: expected a tensor \[2, 32, …\] .*, got \(2, 31\): "
    with pytest.raises(ValueError, match=message):
        trainer.predict(packed(2))
