"""What TRL's reward trainer asks a classifier for, answered by an engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from oomb.core.inputs import all_labels
from oomb.hf.batch import engine_arguments
from oomb.hf.fused_head import FusedHead


class LastToken(FusedHead):
    """Answers every call of a sequence classifier: its own head on the engine's hidden states.

    Hidden states are leaves on the host. The head runs on those of each sequence's last token, in
    the caller's graph.
    """

    def _asked(self, fused_lm_head: bool) -> bool:
        return True

    def _values(self, keywords: dict[str, Any]) -> SequenceClassifierOutputWithPast:
        ids, mask = keywords["input_ids"], keywords.get("attention_mask")
        keywords.pop("return_dict", None)  # PEFT says so; it is the default
        keywords.pop("margin", None)  # a column of preferences, which TRL's loss reads itself
        given = {name: x for name, x in keywords.items() if x is not None}
        arguments: dict[str, Any] = engine_arguments({"labels": all_labels(ids, mask), **given})
        with self._autocast():
            call = self._engine.two_pass(
                **arguments,
                logprobs=False,
                hidden=True,
                share_prefixes="auto",
                on_progress=self._on_progress,
            ).__enter__()
            if torch.is_grad_enabled():
                self.pending.append(call)
            return SequenceClassifierOutputWithPast(logits=call.of_sequences())
