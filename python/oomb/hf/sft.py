"""TRL's SFTTrainer through the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from trl.trainer.sft_trainer import SFTTrainer as StockSFTTrainer

from oomb.core.loss import TokenRows
from oomb.hf.trainer import EngineTrainerMixin
from oomb.results import Step


class SFTTrainer(EngineTrainerMixin, StockSFTTrainer):
    """``trl.SFTTrainer`` through the engine: preparation of data, packing, adapters are TRL's, and
    so are the losses ``nll`` and ``dft`` and the metrics.

        trainer = oomb.hf.SFTTrainer(model, args=SFTConfig(...), oomb_config=oomb.Config())
    """

    @property
    def _asked(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"token_metrics": True}
        if self._is_dft:
            asked["token_loss"] = _dft
        return asked

    @property
    def _is_dft(self) -> bool:
        return getattr(self.args, "loss_type", "nll") == "dft"

    def _told(self, step: Step) -> None:
        of_mode = self._metrics["train" if self.model.training else "eval"]
        of_mode["entropy"].append(step.metrics["entropy"])
        of_mode["mean_token_accuracy"].append(step.metrics["accuracy"])

    def _evaluated(self, step: Step) -> torch.Tensor:
        if not self._is_dft:
            return step.loss
        assert step.logprobs is not None
        return -(step.logprobs.exp() * step.logprobs).sum() / step.num_valid_tokens

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        loss = super().training_step(model, inputs, num_items_in_batch)
        tokens = sum(self.replicas.collect(lambda: tokens))
        self._total_train_tokens += tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def prediction_step(self, *args: Any, **keywords: Any) -> Any:
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        return super().prediction_step(*args, **keywords)


def _dft(logits: torch.Tensor, rows: TokenRows) -> torch.Tensor:
    """Each token's term weighed by its probability, as a constant (arXiv:2508.05629)."""
    terms = F.cross_entropy(logits, rows.targets, reduction="none")
    return terms * (-terms.detach()).exp()
