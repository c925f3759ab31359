"""Asks a page rule for its lists, and checks what it gives."""

from __future__ import annotations

import torch

from oomb.config import PageRule, Past, TopKPages
from oomb.ops.selection import top_k_lists
from oomb.parallel.placement import Placement


class Selector:
    """Chooses past pages by a rule in one call of the engine.

    A rule of the user's own is trusted as little as any argument: the shape of its lists is checked
    each time. Their values are checked each time on a CPU; on a GPU once per call, since the host
    has to wait for them.
    """

    def __init__(self, rule: PageRule, placement: Placement) -> None:
        self._rule = rule
        self._placement = placement
        self._is_ours = type(rule) is TopKPages
        self._checked = False

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: Past) -> torch.Tensor:
        """Lists of a chunk's queries, as :meth:`oomb.PageRule.choose` gives them.

        Raises:
            ValueError: they are not what the rule promised.
        """
        with torch.no_grad():
            if isinstance(self._rule, TopKPages) and self._is_ours:
                return top_k_lists(self._rule, q.detach(), summaries, past, self._placement)
            lists = self._rule.choose(q.detach(), summaries, past)
        self._check(lists, q, summaries, past)
        return _without_padding(lists, past)

    def _check(
        self, lists: torch.Tensor, q: torch.Tensor, summaries: torch.Tensor, past: Past
    ) -> None:
        rule = self._rule
        name = f"{type(rule).__name__}.choose"
        heads = 1 if rule.share == "all_heads" else summaries.shape[2]
        blocks = -(-q.shape[2] // past.page_size)
        shape = (q.shape[0], blocks, heads, rule.max_pages)
        expected = f"int32 {list(shape)} on {q.device}"
        if not isinstance(lists, torch.Tensor):
            raise ValueError(f"{name}: expected {expected}, got {type(lists).__name__}")
        got = f"{lists.dtype} {list(lists.shape)} on {lists.device}".removeprefix("torch.")
        fits = tuple(lists.shape) == shape and lists.dtype == torch.int32
        if not fits or lists.device != q.device or not lists.is_contiguous():
            raise ValueError(f"{name}: expected contiguous {expected}, got {got}")
        if q.device.type == "cpu" or not self._checked:
            _check_values(name, lists, past)
            self._checked = True


def _without_padding(lists: torch.Tensor, past: Past) -> torch.Tensor:
    """Pages behind a sequence's last token do not exist; a rule need not know."""
    if past.num_keys is None:
        return lists
    existing = -(-past.num_keys // past.page_size)
    return lists.masked_fill(lists >= existing[:, None, None, None], -1)


def _check_values(name: str, lists: torch.Tensor, past: Past) -> None:
    """Numbers of past pages, ascending, then -1."""
    inside = (lists >= -1) & (lists < past.num_pages)
    before, after = lists[..., :-1], lists[..., 1:]
    ascends = (after > before) & (before >= 0) | (after == -1)
    if not bool(inside.all()):
        low, high = (int(x) for x in torch.aminmax(lists))
        raise ValueError(
            f"{name}: expected pages in [0, {past.num_pages}) or -1, got {low} … {high} at layer "
            f"{past.layer}, chunk {past.chunk}"
        )
    if not bool(ascends.all()):
        row = lists[(~ascends).any(dim=-1)][0].tolist()
        raise ValueError(
            f"{name}: expected ascending pages, then -1, got {row} at layer {past.layer}, chunk "
            f"{past.chunk}"
        )
