"""Heads copied from one order of axes to another: the bits of torch's copy, whatever their size."""

from __future__ import annotations

import pytest
import torch

from oomb.parallel import heads as module
from oomb.parallel.exchange import _messages, _whole_heads
from oomb.parallel.heads import HeadShares, copy_heads

# What is between two rows of a tensor, and before the first one, in elements.
GAPS = {"packed": (0, 0), "in a wider one": (8, 0), "at an odd place": (3, 0), "behind one": (0, 1)}


def bits(*shape: int, dtype: torch.dtype, gap: int, offset: int) -> torch.Tensor:
    """Random bytes, NaN of all kinds among them, in rows with a gap between them."""
    rows, size = torch.Size(shape[:-1]).numel(), shape[-1] + gap
    number = offset + rows * size
    drawn = torch.randint(256, (number * dtype.itemsize,), dtype=torch.uint8)
    return drawn.view(dtype)[offset:].view(*shape[:-1], size)[..., : shape[-1]]


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("head_dim", [1, 4, 6, 8, 64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_has_the_bits_of_a_copy(dtype: torch.dtype, head_dim: int, gaps: str, tokens: int) -> None:
    gap, offset = GAPS[gaps]
    torch.manual_seed(head_dim)
    x = bits(2, 3, tokens, head_dim, dtype=dtype, gap=gap, offset=offset)
    room = bits(tokens, 2, 3, head_dim, dtype=dtype, gap=gap, offset=offset)
    expected = room.clone()
    for target, copy in ((room, copy_heads), (expected, torch.Tensor.copy_)):
        copy(target, x.permute(2, 0, 1, 3))
    same = [y.contiguous().view(torch.uint8) for y in (room, expected)]
    assert torch.equal(*same)


@pytest.mark.parametrize("same", [True, False])
def test_spreads_and_converts(same: bool) -> None:
    """One head for several places, as copies of keys are; and another dtype."""
    x = torch.randn(2, 1, 5, 16, dtype=torch.float32)
    room = torch.zeros(2, 3, 5, 16, dtype=x.dtype if same else torch.bfloat16)
    copy_heads(room, x)
    assert torch.equal(room, x.expand(2, 3, 5, 16).to(room.dtype))


def test_whole_heads_go_in_pieces() -> None:
    """A model's heads do, also one that is a part of a message."""
    message = torch.zeros(7, 2, 6, 128, dtype=torch.bfloat16)
    for part in (message, message[:, :, 2:4], message.permute(1, 2, 0, 3)):
        assert module._in_pieces(part)
    for part in (message[..., 1:], message[..., ::2], message.transpose(2, 3), message[:0]):
        assert not module._in_pieces(part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [8, 6])
@pytest.mark.parametrize(
    "shares",
    [HeadShares(28, 4, 8), HeadShares(28, 4, 2), HeadShares(16, 2, 4), HeadShares(5, 1, 3)],
    ids=str,
)
def test_messages_have_the_heads_of_each_rank(
    shares: HeadShares, head_dim: int, dtype: torch.dtype
) -> None:
    """In pieces of 16 bytes and whole; and back, where each rank returns multiples of its keys."""
    own, numbers = 3, (shares.query_heads, shares.kv_heads, shares.kv_heads)
    q, k, v = (torch.randint(-9, 9, (2, n, own + 1, head_dim)).to(dtype) for n in numbers)
    messages = _messages(shares, own, (q, k, v)).view(shares.ranks, own, 2, -1, head_dim)
    for rank, message in enumerate(messages):
        group, copy = divmod(rank, shares.copies)
        places = message.permute(1, 2, 0, 3)[:, : shares.queries].unflatten(1, (shares.keys, -1))
        first, last = shares.part(copy)
        for key, found in enumerate(places.unbind(1)):
            of_key = q.unflatten(1, (shares.kv_heads, -1))[:, group * shares.keys + key, :, :own]
            assert torch.equal(found[:, : last - first], of_key[:, first:last])
            assert not found[:, last - first :].any()
        for other, x in enumerate((k, v)):
            begin = shares.queries + other * shares.keys
            found = message.permute(1, 2, 0, 3)[:, begin : begin + shares.keys]
            assert torch.equal(found, x[:, slice(*shares.keys_of(rank)), :own])
    for rank, message in enumerate(messages):
        message[..., shares.queries :, :] *= 1 + rank % shares.copies  # so that copies differ
    q_back, *keys_back = _whole_heads(shares, 2, messages)
    assert torch.equal(q_back, q[:, :, :own].transpose(1, 2))
    for x, found in zip((k, v), keys_back, strict=True):
        times = sum(range(1, shares.copies + 1))
        assert torch.equal(found.to(dtype), x[:, :, :own].transpose(1, 2) * times)
