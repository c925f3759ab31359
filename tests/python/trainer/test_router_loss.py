"""The loss of a mixture of experts with its routers' share is the stock trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import oomb
from engine.router_models import routed
from oomb.hf import SFTTrainer, Trainer

from .runs import CONFIG, arguments, logged, masked, packed, prompts, sft_arguments, tokenizer


def run(kind: Any, folder: Path, data: list[Any], **settings: Any) -> Any:
    own: dict[str, Any] = {"oomb_config": CONFIG} if issubclass(kind, Trainer) else {}
    trainer = kind(
        routed("Qwen3Moe", torch.float32),
        arguments(folder, max_steps=3, **settings),
        train_dataset=data,
        eval_dataset=data[:5],
        **own,
    )
    trainer.train()
    trainer.evaluate()
    return trainer


@pytest.mark.parametrize("data", [packed, masked], ids=lambda f: f.__name__)
def test_equals_the_stock_trainer(data: Any, tmp_path: Path) -> None:
    """Three micro-batches a step; one of them has no target, and trains its routers alone."""
    rows = data()
    for row in rows:
        row["labels"] = row["labels"] if row is not rows[4] else [-100] * len(row["labels"])
    settings = {"optim": "sgd", "seed": 7}
    ours = run(Trainer, tmp_path / "ours", rows, **settings)
    stock = run(transformers.Trainer, tmp_path / "stock", rows, **settings)
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("eval_loss", 1e-5)):
        expected = logged(stock, name)
        assert expected
        assert logged(ours, name) == pytest.approx(expected, rel=tolerance), name
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)


def test_a_batch_without_targets_trains_routers(tmp_path: Path) -> None:
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in masked()[:4]] + masked()[4:6]
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 6,
        "optim": "sgd",
    }
    ours = run(Trainer, tmp_path / "ours", rows, **settings)
    stock = run(transformers.Trainer, tmp_path / "stock", rows, **settings)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-5)
    assert logged(ours, "grad_norm") == pytest.approx(logged(stock, "grad_norm"), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"fp16": True}, "fp16: expected False"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: expected 1, got 2"),
    ],
)
def test_what_scales_or_divides_it_is_refused(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    class Own(Trainer):
        """Of a model whose forward takes no num_items_in_batch."""

        @property
        def model_accepts_loss_kwargs(self) -> bool:
            return False

        @model_accepts_loss_kwargs.setter
        def model_accepts_loss_kwargs(self, _: bool) -> None: ...

    with pytest.raises(ValueError, match=text):
        Own(
            routed("Qwen3Moe", torch.float32),
            arguments(tmp_path, **{"gradient_accumulation_steps": 1, **settings}),
            train_dataset=masked(),
        )


def test_trls_trainer_still_refuses_it(tmp_path: Path) -> None:
    """It divides the term by the steps of accumulation."""
    with pytest.raises(ValueError, match="router_aux_loss_coef: expected 0.0, got 0.7"):
        SFTTrainer(
            routed("Qwen3Moe", torch.float32),
            args=sft_arguments(tmp_path),
            train_dataset=prompts(),
            processing_class=tokenizer(),
            oomb_config=oomb.Config(),
        )
