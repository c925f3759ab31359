"""A page rule of your own: a choice in two levels, groups of pages first, then pages.

    python examples/page_rule.py

Scoring every page of a very long past costs time that grows with it. Here a block of queries ranks
groups of pages by their mean key, and single pages only inside the best groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

import oomb


@dataclass(frozen=True, kw_only=True)
class TwoLevels(oomb.PageRule):
    """The best ``groups`` groups of ``group`` pages, then the best ``budget`` pages in them."""

    budget: int
    group: int = 4
    groups: int = 2

    @property
    def max_pages(self) -> int:
        return self.budget

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
        pages, missing = past.num_pages, -q.shape[2] % past.page_size
        blocks = pad(q, (0, 0, 0, missing)).unflatten(2, (-1, past.page_size)).mean(3)
        keys = summaries[:, :pages].repeat_interleave(q.shape[1] // summaries.shape[2], dim=2)
        scores = torch.einsum("bhqd,bphd->bqp", blocks, keys)  # a page's, for each block of queries
        grouped = pad(scores, (0, -pages % self.group)).unflatten(-1, (-1, self.group)).mean(-1)
        best = grouped.topk(min(self.groups, grouped.shape[-1])).indices
        inside = torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, best, True)
        inside = inside.repeat_interleave(self.group, dim=-1)[..., :pages]
        values, lists = scores.masked_fill(~inside, -torch.inf).topk(self.budget)
        lists = lists.masked_fill(values.isinf(), pages).sort(-1).values  # absent pages go last
        return lists.masked_fill(lists == pages, -1).to(torch.int32)[:, :, None]  # for all heads


def main() -> None:
    """Train a tiny random model for a few steps, densely and by the rule."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    sizes["max_position_embeddings"] = 4096
    ids = torch.randint(256, (1, 4000), generator=torch.Generator().manual_seed(0))
    for rule in (oomb.Dense(), TwoLevels(budget=6)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with oomb.Engine(
            model, oomb.Config(chunk_size=512, page_size=64, attention=rule)
        ) as engine:
            for step in range(3):
                loss = engine.forward_backward(ids, ids).loss
                optimizer.step()
                optimizer.zero_grad()
                print(f"{type(rule).__name__}: step {step}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
