"""Predictions of an evaluation, made of logits slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from oomb.core.inputs import IGNORED

Preprocess = Callable[[torch.Tensor, torch.Tensor], Any]  # as the stock trainer's


class Predictions:
    """Collects what is kept of a batch's logits.

    Args:
        labels: [batch, tokens] int64.
        preprocess: what to keep of logits [batch, some tokens, vocabulary] and their labels; None:
            the logits themselves.
        in_float: logits in fp32, as the stock trainer gives them under autocast.
    """

    def __init__(
        self, labels: torch.Tensor, preprocess: Preprocess | None, *, in_float: bool
    ) -> None:
        self._labels = labels
        self._preprocess = preprocess
        self._in_float = in_float
        self._parts: dict[int, Any] = {}

    def add(self, begin: int, logits: torch.Tensor) -> None:
        """Logits [batch, n, vocabulary] of the tokens from ``begin`` on.

        Raises:
            ValueError: ``preprocess`` gives something else than tensors [batch, n, …].
        """
        if self._in_float:
            logits = logits.float()
        if self._preprocess is None:
            self._parts[begin] = logits
            return
        tokens = slice(begin, begin + logits.shape[1])
        kept = self._preprocess(logits, self._labels[:, tokens])
        for tensor in tree_leaves(kept):
            _expect_rows(tensor, logits)
        self._parts[begin] = kept

    def joined(self) -> Any:
        """Of all tokens: [batch, tokens, …], in the structure that ``preprocess`` gives.

        -100 at padding that was not run, as the stock trainer pads.
        """
        parts = [tree_flatten(self._parts[begin]) for begin in sorted(self._parts)]
        columns = zip(*(tensors for tensors, _ in parts), strict=True)
        return tree_unflatten([self._padded(torch.cat(c, dim=1)) for c in columns], parts[0][1])

    def _padded(self, kept: torch.Tensor) -> torch.Tensor:
        batch, tokens = self._labels.shape
        padding = kept.new_full((batch, tokens - kept.shape[1], *kept.shape[2:]), IGNORED)
        return torch.cat([kept, padding], dim=1) if padding.numel() else kept


def _expect_rows(kept: object, logits: torch.Tensor) -> None:
    got = tuple(kept.shape) if isinstance(kept, torch.Tensor) else type(kept).__name__
    if not isinstance(got, tuple) or got[:2] != tuple(logits.shape[:2]):
        batch, tokens = logits.shape[:2]
        raise ValueError(
            f"preprocess_logits_for_metrics: expected a tensor [{batch}, {tokens}, …] for logits "
            f"{tuple(logits.shape)}, got {got}: it sees a slice of the sequence at a time and has "
            "to keep its tokens; shift labels in compute_metrics"
        )
