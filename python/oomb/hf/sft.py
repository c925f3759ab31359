"""TRL's SFTTrainer through the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trl.trainer.sft_trainer import SFTTrainer as StockSFTTrainer

from oomb.hf.trainer import EngineTrainerMixin


class SFTTrainer(EngineTrainerMixin, StockSFTTrainer):
    """``trl.SFTTrainer`` through the engine: preparation of data, packing, adapters are TRL's.

    Its metrics ``entropy`` and ``mean_token_accuracy`` need logits of whole sequences and are not
    reported.

        trainer = oomb.hf.SFTTrainer(model, args=SFTConfig(...), oomb_config=oomb.Config())
    """

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._total_train_tokens += tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def prediction_step(self, *args: Any, **keywords: Any) -> Any:
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        return super().prediction_step(*args, **keywords)
