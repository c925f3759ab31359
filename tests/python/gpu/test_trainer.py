"""The Trainer on a GPU: mixed precision as the stock one's, and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from oomb.hf import Trainer
from trainer.runs import CONFIG, arguments, logged, model, packed

pytestmark = pytest.mark.gpu


def losses(kind: Any, folder: Path, **settings: Any) -> list[float]:
    resumed = settings.pop("resume_from_checkpoint", None)
    own = {"oomb_config": CONFIG} if issubclass(kind, Trainer) else {}
    settings = {"use_cpu": False, **settings}
    trainer = kind(model(), arguments(folder, **settings), train_dataset=packed(), **own)
    trainer.train(resume_from_checkpoint=resumed)
    return logged(trainer, "loss")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str, tmp_path: Path) -> None:
    """As far from fp32 as the stock trainer's own; fp16 scales its gradients."""
    exact = losses(transformers.Trainer, tmp_path / "exact")
    stock = losses(transformers.Trainer, tmp_path / "stock", **{precision: True})
    ours = losses(Trainer, tmp_path / "ours", **{precision: True})
    error = max(abs(x - y) for x, y in zip(stock, exact, strict=True))
    assert error > 0
    for mine, theirs in zip(ours, exact, strict=True):
        assert abs(mine - theirs) <= 2 * error


def test_fp32(tmp_path: Path) -> None:
    stock = losses(transformers.Trainer, tmp_path / "stock")
    assert losses(Trainer, tmp_path / "ours") == pytest.approx(stock, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resumed(precision: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, precision: True}
    whole = losses(Trainer, tmp_path / "run", **settings)
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert losses(Trainer, tmp_path / "b", resume_from_checkpoint=str(path), **settings) == whole


def test_metrics(tmp_path: Path) -> None:
    """Logits in slices give the stock trainer's metrics and predictions."""
    found = []
    for kind, own in ((transformers.Trainer, {}), (Trainer, {"oomb_config": CONFIG})):
        trainer = kind(
            model(),
            arguments(tmp_path, use_cpu=False),
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
            compute_metrics=lambda found: {"mean": float(found.predictions.mean())},
            **own,
        )
        found.append(trainer.predict(packed(5)))
    stock, ours = found
    assert (ours.predictions == stock.predictions).all()
    assert ours.metrics["test_mean"] == stock.metrics["test_mean"]
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)
