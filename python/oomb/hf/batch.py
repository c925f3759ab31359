"""A trainer's batch as arguments of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oomb.core.inputs import IMAGE_ARGUMENTS, document_starts, text_positions

ENGINE_COLUMNS = (
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "document_ids",
    "loss_weights",
)
# What padding-free collators add for attention kernels that are not used here; all of it follows
# from position_ids.
_FOLLOW_FROM_POSITIONS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
_IGNORED = -100


def engine_arguments(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The engine's arguments in a batch.

    Raises:
        ValueError: ``labels`` are missing, or the model would need something else; names it.
    """
    known = (*ENGINE_COLUMNS, *IMAGE_ARGUMENTS)
    arguments = {name: inputs[name] for name in known if inputs.get(name) is not None}
    for name, value in inputs.items():
        if name in known or value is None or (name == "use_cache" and not value):
            continue
        if name not in _FOLLOW_FROM_POSITIONS:
            raise ValueError(
                f"batch: expected {', '.join(ENGINE_COLUMNS)} and arguments for images, got "
                f"{name}, which the engine cannot pass to the model"
            )
        if "position_ids" not in arguments:
            raise ValueError(f"batch: expected position_ids beside {name}, got none")
    for name in ("input_ids", "labels"):
        if name not in arguments:
            raise ValueError(f"batch: expected {name}, got {', '.join(sorted(inputs))}")
    return arguments


def counted_labels(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Labels [batch, tokens] of a batch, -100 where the engine counts none: also at the first
    token of a document, which nothing predicts."""
    labels: torch.Tensor = inputs["labels"]
    starts = torch.zeros_like(labels, dtype=torch.bool)
    starts[:, :1] = True
    of_documents = document_starts(
        text_positions(inputs.get("position_ids")),
        inputs.get("document_ids"),
        positions_tell=inputs.get("attention_mask") is None,
    )
    if of_documents is not None:
        starts |= of_documents
    return labels.masked_fill(starts, _IGNORED)


def num_targets(inputs: Mapping[str, Any]) -> int:
    """Tokens of a batch that are predicted and counted."""
    return int((counted_labels(inputs) != _IGNORED).sum())
