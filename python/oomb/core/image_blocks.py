"""Tokens of an image that see one another, also those behind them.

Pages and kernels know causal attention alone. So a block of such tokens lies within one chunk, and
what its rows see of later keys is added to attention's output, by the log-sum-exp of both parts.
"""

from __future__ import annotations

import torch

from oomb.config import Config
from oomb.core.layout import Chunks
from oomb.core.tree import TreeChunks
from oomb.model.interface import AttentionCall

Block = torch.Tensor  # [n, length] places in a chunk's tokens [B * C], of n blocks of a length


def chunks_between(config: Config, tokens: int, blocks: torch.Tensor) -> Chunks | None:
    """Chunks whose borders are at page borders outside of blocks; None: plain ones are so.

    Args:
        blocks: [m, 3]: sequence, first token and last + 1.

    Raises:
        ValueError: within ``chunk_size`` tokens there is no such border.
    """
    plain = Chunks.of(config, tokens)
    page = config.page_size
    borders = torch.arange(0, tokens + page, page)
    inside = torch.zeros(int(borders[-1]) + 2, dtype=torch.int64)
    begins = blocks[:, 1].clamp(max=tokens)
    inside.index_add_(0, begins + 1, torch.ones_like(begins))
    ends = blocks[:, 2].clamp(max=tokens)
    inside.index_add_(0, ends.maximum(begins + 1), -torch.ones_like(ends))
    free = (inside.cumsum(0)[borders] == 0).tolist()
    last = [border // page for border, _ in plain.spans[1:]]
    if all(free[border] for border in last):
        return None
    most, pages, cuts = plain.most_pages, -(-tokens // page), [0]
    while pages - cuts[-1] > most:
        reachable = [x for x in range(cuts[-1] + 1, cuts[-1] + most + 1) if free[x]]
        if not reachable:
            begin = cuts[-1] * page
            raise ValueError(
                f"chunk_size: expected a page border between images within {config.chunk_size} "
                f"tokens from token {begin} on, got none, since the tokens of an image see one "
                f"another: take larger chunks or smaller pages (page_size={page})"
            )
        cuts.append(reachable[-1])
    ends_of = (*(cut * page for cut in cuts[1:]), tokens)
    pasts = tuple(((0, cut),) for cut in cuts)
    return TreeChunks(tokens, config.chunk_size, page, ends_of, pasts, (*cuts, pages))


def blocks_of(blocks: torch.Tensor, begin: int, end: int, device: torch.device) -> list[Block]:
    """Blocks of a chunk, those of a length together."""
    inside = blocks[(blocks[:, 1] >= begin) & (blocks[:, 2] <= end)]
    lengths = inside[:, 2] - inside[:, 1]
    found = []
    for length in lengths.unique().tolist():
        first = inside[lengths == length]
        first = first[:, 0] * (end - begin) + first[:, 1] - begin
        found.append((first[:, None] + torch.arange(length)).to(device))
    return found


def with_later_keys(
    o: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    block: Block,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention o [B, Hq, C, D], lse [B, Hq, C] over earlier keys and, within blocks, later ones.

    Of a block of L tokens, row i has L - 1 - i later keys, so the last row has none:

        rows 0 … L-2    x x x x
                          x x x     keys 1 … L-1
                            x x
                              x
    """
    number, length = block.shape
    rows, keys = block[:, :-1].flatten(), block[:, 1:].flatten()
    groups = q.shape[1] // k.shape[1]

    def of(x: torch.Tensor, places: torch.Tensor, repeated: int = 1) -> torch.Tensor:
        """[n, H, L - 1, D] of x [B, H, C, D]."""
        taken = x.transpose(1, 2).flatten(0, 1)[places].to(lse.dtype)
        taken = taken.unflatten(0, (number, length - 1)).transpose(1, 2)
        return torch.repeat_interleave(taken, repeated, dim=1)

    scores = call.capped(of(q, rows) @ of(k, keys, groups).transpose(-1, -2) * call.scale)
    earlier = torch.ones(length - 1, length - 1, dtype=torch.bool, device=q.device).tril(-1)
    scores = scores.masked_fill(earlier, -torch.inf)
    later = scores.logsumexp(dim=-1)
    o_later = scores.softmax(dim=-1) @ of(v, keys, groups)
    before = of(lse[..., None], rows)[..., 0]
    both = torch.logaddexp(before, later)
    share = (later - both).exp()[..., None]
    mixed = of(o, rows) * (before - both).exp()[..., None] + o_later * share
    o = _replaced(o, rows, mixed)
    return o, _replaced(lse[..., None], rows, both[..., None])[..., 0]


def _replaced(x: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """x [B, H, C, D] with new [n, H, L, D] at places [n * L] of its tokens."""
    batch, _, tokens, _ = x.shape
    values = new.transpose(1, 2).flatten(0, 1).to(x.dtype)
    flat = x.transpose(1, 2).flatten(0, 1).index_copy(0, places, values)
    return torch.unflatten(flat, 0, (batch, tokens)).transpose(1, 2)
