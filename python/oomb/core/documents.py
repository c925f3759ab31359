"""Where the documents of packed sequences begin."""

from __future__ import annotations

import torch

from oomb.core.arguments import expect


def document_starts(
    positions: torch.Tensor | None,
    documents: torch.Tensor | None,
    positions_tell: bool,
) -> torch.Tensor | None:
    """[B, T] bool: a document starts here; None where each sequence is one document.

    Positions tell documents apart as Hugging Face reads them: where they do not go up by one, and
    there is no attention mask. Where documents are told by number, positions may skip some inside.
    """
    restarts = None
    if positions is not None:
        restarts = torch.ones_like(positions, dtype=torch.bool)
        restarts[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
    if documents is not None:
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        for row in documents[:, 1:][starts[:, 1:].any(dim=1)]:
            runs = torch.unique_consecutive(row)
            expect(
                runs.unique().numel() == runs.numel(),
                "document_ids",
                "contiguous documents",
                "a document in pieces",
            )
        if positions is not None and restarts is not None:
            falls = positions[:, 1:] <= positions[:, :-1]
            agree = bool((~falls | starts[:, 1:]).all()) and bool((~starts | restarts).all())
            expect(
                agree,
                "document_ids",
                "documents that start where position_ids restart",
                "other borders",
            )
    elif positions_tell and restarts is not None:
        starts = restarts
    else:
        return None
    return starts if bool(starts[:, 1:].any()) else None


def document_start_of(starts: torch.Tensor) -> torch.Tensor:
    """[B, T] int32: index of the first token of each token's document."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return torch.where(starts, index, 0).cummax(dim=1).values.to(torch.int32)
