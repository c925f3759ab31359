"""A Trainer on batches with images, beside the stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset

import oomb
from engine.image_models import batch_of, make_with_images
from oomb import hf

from .runs import arguments


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences with one or two images each, of two lengths."""

    def __init__(self, family: str) -> None:
        images = [[(3, 2, 2)], [(14, 2, 2), (30, 2, 2)], [(8, 2, 2)], [(15, 2, 2)]]
        self._rows = [
            batch_of(family, [row], 40 + 6 * (n % 2), seed=n) for n, row in enumerate(images)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        return {"input_ids": row.input_ids, **row.arguments}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As processors do: tokens padded to one length, images one behind the other."""
    length = max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        if name in ("input_ids", "token_type_ids", "mm_token_type_ids"):
            parts = [torch.nn.functional.pad(x, (0, length - x.shape[1])) for x in parts]
        batch[name] = torch.cat(parts)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
    return batch


def test_as_the_stock_trainer(tmp_path: Path) -> None:
    family = "qwen3-vl"  # Gemma's own loss is a mean over each micro-batch
    losses, evaluated = [], []
    for kind, more in (
        (transformers.Trainer, {}),
        (hf.Trainer, {"oomb_config": oomb.Config(chunk_size=16, page_size=4)}),
    ):
        settings = arguments(
            tmp_path,
            remove_unused_columns=False,
            gradient_accumulation_steps=2,
            max_steps=3,
            max_grad_norm=0.0,
        )
        model = make_with_images(family).float()
        rows: Any = Rows(family)
        trainer = kind(
            model, settings, train_dataset=rows, eval_dataset=rows, data_collator=collate, **more
        )
        # The stock class does not pass the number of targets to these models; ours counts them.
        trainer.model_accepts_loss_kwargs = True
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
        evaluated.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-3)
