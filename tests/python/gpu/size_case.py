"""Training of a model of real width at a real length, the ordinary way and in fp32.

The reference computes attention by blocks of queries from its definition, in fp32 and without
kernels of anybody: softmax(q kᵀ / √d) v over the keys that a query may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

_QUERIES = 1024  # of one block of the reference
_LOSS_ROWS = 2048  # tokens whose logits exist together

Lists = list[torch.Tensor | None]  # per chunk: int32 [1, blocks, 1, budget] of one layer


class Visible:
    """Which keys each query of a layer may see.

    Args:
        lists: pages that each block of ``page_size`` queries has chosen from the chunks before its
            own; None: dense.
    """

    def __init__(self, chunk_size: int, page_size: int, lists: Lists | None = None) -> None:
        self._chunk_size, self._page_size, self._lists = chunk_size, page_size, lists

    def mask(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """[end - begin, end] bool for queries [begin, end), which lie within one chunk."""
        rows = torch.arange(begin, end, device=device)
        keys = torch.arange(end, device=device)
        causal = keys <= rows[:, None]
        if self._lists is None:
            return causal
        chunk = begin // self._chunk_size
        start = chunk * self._chunk_size
        lists = self._lists[chunk]
        if lists is None:
            return causal
        pages = start // self._page_size
        chosen = torch.zeros(lists.shape[1], pages, dtype=torch.bool, device=device)
        named = lists[0, :, 0].to(device).long()
        assert bool((named >= 0).all())
        chosen.scatter_(1, named, True)
        block = (rows - start) // self._page_size
        past = chosen[block].repeat_interleave(self._page_size, dim=1)
        return torch.cat([past, causal[:, start:]], dim=1)


@contextmanager
def attention_of(
    model: PreTrainedModel, visible: list[Visible], by_definition: bool
) -> Iterator[None]:
    """Layer ``i`` sees what ``visible[i]`` says; through SDPA unless by definition."""

    def run(
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        _: torch.Tensor | None,
        scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        seen = visible[module.layer_idx]
        parts = []
        for begin in range(0, q.shape[2], _QUERIES):
            end = min(begin + _QUERIES, q.shape[2])
            arguments = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
            mask = seen.mask(begin, end, q.device)
            block = _definition if by_definition else _sdpa
            parts.append(checkpoint(block, *arguments, mask, scaling, use_reentrant=False))
        return torch.cat(parts, dim=2).transpose(1, 2), None

    AttentionInterface.register("visible", run)
    before = model.config._attn_implementation
    model.config._attn_implementation = "visible"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    scores = (q * scaling) @ k.transpose(2, 3)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)


def trained(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of one ordinary step with checkpointing, taken off the model.

    Logits in slices, their loss in fp32, as in an ordinary step whose logits fit.
    """
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        inputs, targets = ids[:, :-1], ids[0, 1:]
        hidden = model.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state
        leaf = hidden.detach().requires_grad_()
        for part in torch.arange(targets.numel(), device=ids.device).split(_LOSS_ROWS):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            logits = model.get_output_embeddings()(leaf[0, rows]).float()
            (F.cross_entropy(logits, targets[rows], reduction="sum") / targets.numel()).backward()
        hidden.backward(leaf.grad)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    return taken(model)


def taken(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients, taken off the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative error of each parameter's gradient."""
    return {
        name: float((found[name].float() - value).norm() / value.norm())
        for name, value in exact.items()
    }


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Parameters whose gradients differ in any bit, or that only one has."""
    return [name for name in a.keys() | b.keys() if not _same(a.get(name), b.get(name))]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)
