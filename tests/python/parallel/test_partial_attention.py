"""Attention over parts of the keys, merged: o, its log-sum-exp and gradients of that over all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from oomb.parallel.heads import HeadShares
from oomb.parallel.mesh import placement_of
from oomb.parallel.partial_attention import PartialAttention, merged

from .world import World, meshes

KEYS, TOKENS, WIDTH = 11, 5, 6


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of [B, H, C, D] over [B, Hkv, n, D]; where no keys are, o = 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num() @ v, lse


def drawn(heads: int, tokens: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, heads, tokens, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("bounds", [(0, 11), (0, 4, 11), (0, 0, 4, 9, 11), (0, 1, 11, 11)])
def test_merges_parts(bounds: tuple[int, ...]) -> None:
    """Also where a part has no keys."""
    q, k, v = drawn(4, TOKENS, 0), drawn(2, KEYS, 1), drawn(2, KEYS, 2)
    parts = [attend(q, k[:, :, begin:end], v[:, :, begin:end]) for begin, end in pairwise(bounds)]
    found = merged(torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts]))
    for ours, theirs in zip(found, attend(q, k, v), strict=True):
        assert (ours - theirs).abs().max() < 1e-14


def test_row_that_sees_nothing() -> None:
    o, lse = torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf)
    o[1, 1], lse[1, 1] = 7.0, 90.0  # e^90 is no fp32
    o, lse = merged(o, lse)
    assert torch.equal(o, torch.tensor([[0.0] * 4, [7.0] * 4]))
    assert torch.equal(lse, torch.tensor([-torch.inf, 90.0]))


def test_half_precision_is_merged_in_full() -> None:
    """256 + 1 + 1 + … in bf16 stays 256."""
    o = torch.ones(9, 1, 1, dtype=torch.bfloat16)
    o[0] = 256
    whole, lse = merged(o, torch.zeros(9, 1))
    assert whole.dtype == lse.dtype == torch.float32
    assert torch.allclose(whole, torch.tensor([[264 / 9]]))
    assert torch.allclose(lse, torch.tensor([9.0]).log())


def over_ranks(rank: int, ranks: int, queries: int, keys: int) -> Any:
    """o, lse and dq of a rank's queries, whose keys it has a part of, beside those over all."""
    if meshes[ranks].get_coordinate() is None:
        return None
    placement = placement_of(meshes[ranks])
    shares = HeadShares(queries, keys, ranks)
    every, k, v = drawn(queries, TOKENS, 0), drawn(keys, KEYS, 1), drawn(keys, KEYS, 2)
    d_every, d_lse_every = drawn(queries, TOKENS, 3), drawn(queries, TOKENS, 4)[..., 0]
    every.requires_grad_()
    o_every, lse_every = attend(every, k, v)
    (dq_every,) = torch.autograd.grad([o_every, lse_every], every, [d_every, d_lse_every])

    def of_rank(x: torch.Tensor) -> torch.Tensor:
        return shares.of_rank(x.detach().transpose(0, 1), placement.rank).transpose(0, 1)

    own, copy = shares.keys_of(placement.rank), placement.rank % shares.copies
    part = torch.arange(KEYS) % shares.copies == copy
    k, v = (x[:, slice(*own), part] for x in (k, v))
    q, o, lse, dq = of_rank(every), *map(of_rank, (o_every, lse_every, dq_every))
    partial = PartialAttention(placement, shares)
    found = [torch.full_like(x, torch.nan) for x in (o, lse, dq)]
    with placement.call():
        with partial.forward(q, *found[:2]) as (queries_here, o_part, lse_part):
            for room, value in zip((o_part, lse_part), attend(queries_here, k, v), strict=True):
                room.copy_(value)
        d_o, d_lse = of_rank(d_every), of_rank(d_lse_every)
        given = partial.backward(q, *found[:2], d_o, d_lse, found[2])
        with given as (queries_here, o_here, lse_here, d_here, d_lse_here, dq_here):
            assert d_lse_here is not None
            keys_here, values = (
                x.repeat_interleave(queries_here.shape[1] // x.shape[1], dim=1) for x in (k, v)
            )
            p = (queries_here @ keys_here.transpose(-1, -2) - lse_here[..., None]).exp()
            delta = (o_here * d_here).sum(-1) - d_lse_here
            dq_here.copy_((p * (d_here @ values.transpose(-1, -2) - delta[..., None])) @ keys_here)
        placement.settle(lambda: None)
    return [(ours, theirs) for ours, theirs in zip(found, (o, lse, dq), strict=True)], shares.width


@pytest.mark.parametrize(
    ("ranks", "queries", "keys"), [(2, 2, 1), (3, 3, 1), (4, 8, 2), (4, 7, 1), (4, 14, 2)]
)
def test_over_ranks(world: World, ranks: int, queries: int, keys: int) -> None:
    """Also where ranks have a query more or less than others."""
    for found in world.run(over_ranks, ranks, queries, keys):
        if found is None:
            continue
        pairs, width = found
        for ours, theirs in pairs:
            there = theirs.unflatten(1, (-1, width)).abs().flatten(3).amax((0, 3)) > 0
            error = (ours - theirs).unflatten(1, (-1, width)).abs().flatten(3).amax((0, 3))
            assert there.any()
            assert error[there].max() < 1e-13
