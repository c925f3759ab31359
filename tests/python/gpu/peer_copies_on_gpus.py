"""Run by torchrun: processes write messages into one another's GPU memory, and all arrives.

Each has a GPU of its own, or all share one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

import oomb
from oomb.parallel.exchange import _to_heads, _to_tokens
from oomb.parallel.group import Ranks
from oomb.parallel.heads import HeadShares
from oomb.parallel.in_order import added_in_order
from oomb.parallel.slices import TokenSlices
from oomb.parallel.sums import sum_in_rank_order

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK % torch.cuda.device_count())
ROUNDS = 60
LONGEST_CYCLES = 3_000_000  # about 2 ms, in which other ranks run ahead
FREED_SECONDS = 5.0

# What rank i sends to rank j in elements of a dtype.
SIZES = {
    "equal": (torch.bfloat16, lambda i, j: 4096),
    "of the receiver": (torch.float32, lambda i, j: 1000 + 8 * j),
    "of the sender": (torch.float64, lambda i, j: 24 * i + 2),
    "nothing from the first": (torch.float32, lambda i, j: 0 if i == 0 else 512),
    "nothing for the last": (torch.bfloat16, lambda i, j: 0 if j == RANKS - 1 else 264),
    "no whole words": (torch.uint8, lambda i, j: 1 + 3 * i + 5 * j),
    "two bytes": (torch.bfloat16, lambda i, j: 7 + 2 * j),
    "nothing at all": (torch.float32, lambda i, j: 0),
    "large": (torch.bfloat16, lambda i, j: 3_000_000 + 8 * i),
    "larger": (torch.float32, lambda i, j: 5_000_000 + j),
}


def values(sender: int, receiver: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a message; what a dtype holds exactly, and what differs in each exchange."""
    first = (17 * sender + 31 * receiver + 7 * number) % 100
    steps = torch.arange(size, device=DEVICE, dtype=torch.int64)
    return ((steps + first) % 100).to(dtype)


def all_arrives() -> None:
    ranks = Ranks(list(range(RANKS)), DEVICE)
    slow = random.Random(RANK)  # each rank is late at moments of its own
    waiting: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for number in range(ROUNDS):
        name = list(SIZES)[number % len(SIZES)] if number < 20 else name_of(number)
        dtype, size = SIZES[name]
        to = [size(RANK, other) for other in range(RANKS)]
        of = [size(other, RANK) for other in range(RANKS)]
        largest = max(size(i, j) for i in range(RANKS) for j in range(RANKS))
        parts = [values(RANK, other, number, n, dtype) for other, n in enumerate(to)]
        expected = torch.cat([values(o, RANK, number, n, dtype) for o, n in enumerate(of)])
        if slow.random() < 0.3:
            torch.cuda._sleep(slow.randrange(LONGEST_CYCLES))
        waiting.append(
            (f"{name}, {number}", ranks.all_to_all(torch.cat(parts), to, of, largest), expected)
        )
        own = values(RANK, 0, number, 100 + number, torch.float32)
        expected = torch.stack(
            [values(o, 0, number, 100 + number, torch.float32) for o in range(RANKS)]
        )
        waiting.append((f"gathered, {number}", ranks.all_gather(own), expected))
    wrong = [name for name, found, expected in waiting if not torch.equal(found, expected)]
    assert not wrong, wrong
    peers = ranks.peers
    assert peers is not None and peers._exchange is not None, "the ranks used NCCL"
    ranks.close()
    again = Ranks(list(range(RANKS)), DEVICE)  # in memory that another group has used
    x = torch.full((5,), float(RANK), device=DEVICE)
    assert again.all_gather(x)[:, 0].tolist() == list(range(RANKS))
    assert again.peers is not None and again.peers._exchange is not None
    again.close()


# Key/value heads of a rank, queries of each, head_dim, sequences, tokens, dtype.
HEADS = [
    (1, 7, 128, 1, 1000, torch.bfloat16),
    (2, 1, 64, 3, 257, torch.float16),
    (1, 3, 24, 2, 100, torch.float32),
    (1, 2, 3, 1, 33, torch.bfloat16),
    (2, 2, 16, 1, RANKS - 1, torch.float64),
    (1, 1, 8, 1, 5, torch.float32),
]


def heads_arrive() -> None:
    ranks = Ranks(list(range(RANKS)), DEVICE)
    ranks.sum(torch.ones(1, device=DEVICE))

    def library(*_: object) -> torch.Tensor:
        raise AssertionError("heads were copied into messages first")

    ranks.all_to_all = library  # type: ignore[method-assign, assignment]
    for keys, of_key, head_dim, batch, tokens, dtype in HEADS:
        shares = HeadShares(RANKS * keys * of_key, RANKS * keys, RANKS)
        slices = TokenSlices(40, 40 + tokens, RANKS, RANK)
        (first, last), own = slices.run, slices.sizes[RANK]
        numbers = (shares.query_heads, shares.kv_heads, shares.kv_heads)
        whole = [every(i, batch, n, tokens, head_dim, dtype) for i, n in enumerate(numbers)]
        here = [x[:, :, first - 40 : last - 40] for x in whole]
        for order in (lambda x: x.contiguous(), tokens_first, heads_first):
            given = tuple(order(x) for x in here)
            held = _to_heads(ranks, slices, shares, given)
            for x, found in zip(whole, held, strict=True):
                assert torch.equal(found, x.chunk(RANKS, dim=1)[RANK]), (keys, of_key, head_dim)
            back = _to_tokens(ranks, slices, shares, tuple(order(x) for x in held))
            for x, found in zip(here, back, strict=True):
                assert torch.equal(found[:, :, :own], x[:, :, :own]), (keys, of_key, head_dim)
                assert not found[:, :, own:].any()
    ranks.close()


def heads_arrive_beside_other_work() -> None:
    """What is sent is made just before, slowly; others are late; and memory is used again."""
    ranks = Ranks(list(range(RANKS)), DEVICE)
    slow, done = random.Random(RANK), [0]

    def meanwhile() -> None:
        done[0] += 1
        if slow.random() < 0.5:
            torch.cuda._sleep(slow.randrange(LONGEST_CYCLES))

    ranks.meanwhile = meanwhile
    shares = HeadShares(4 * RANKS, 2 * RANKS, RANKS)
    slices = TokenSlices(0, 1024, RANKS, RANK)
    (first, last), numbers = slices.run, (shares.query_heads, shares.kv_heads)
    for number in range(ROUNDS):
        whole = [every(i + number, 1, n, 1024, 128, torch.bfloat16) for i, n in enumerate(numbers)]
        torch.cuda.synchronize()
        if slow.random() < 0.5:
            torch.cuda._sleep(slow.randrange(LONGEST_CYCLES))
        given = tuple(tokens_first(x[:, :, first:last]) for x in whole)
        held = _to_heads(ranks, slices, shares, given, aside=True)
        for x in given:  # the next who asks for memory gets this
            x.fill_(-1)
        del given
        scribble = [torch.full_like(x, -2) for x in held]
        wrong = [x.chunk(RANKS, dim=1)[RANK] != y for x, y in zip(whole, held, strict=True)]
        back = _to_tokens(ranks, slices, shares, held, aside=True)
        del held, scribble
        wrong += [
            x[:, :, first:last] != y[:, :, : last - first] for x, y in zip(whole, back, strict=True)
        ]
        assert not any(bool(x.any()) for x in wrong), number
        if number % 3 == 0:  # in between exchanges that the stream waits for
            assert ranks.sum(torch.ones(3, device=DEVICE))[0] == RANKS
    assert done[0] == 2 * ROUNDS
    assert ranks.peers is not None and ranks.peers._exchange is not None
    ranks.close()


# Elements of tensors that are summed at once: parts that ranks divide, and not; of several buckets.
SUMMED = [[4096], [1], [24, 7, 5000], [17 * 2**20 + 3, 100], [3 * 2**20] * 7]


def sums_are_those_in_rank_order() -> None:
    """At once and beside other work, in the middle of exchanges of the stream; others are late."""
    ranks = Ranks(list(range(RANKS)), DEVICE)
    slow = random.Random(RANK)
    for number in range(24):
        dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
        sizes = SUMMED[number % len(SUMMED)]
        own = torch.Generator(DEVICE).manual_seed(100 * number + RANK)
        given = [torch.randn(n, device=DEVICE, dtype=dtype, generator=own) for n in sizes]
        expected = [added_in_order(ranks.all_gather(x)).to(dtype) for x in given]
        if number % 2:
            sum_in_rank_order(ranks, given)
        else:
            assert ranks.sums is not None
            begun = ranks.sums.begin(given)
            assert begun == (dtype != torch.float64)
            for _ in range(3):
                if slow.random() < 0.5:
                    torch.cuda._sleep(slow.randrange(LONGEST_CYCLES))
                assert ranks.sum(torch.ones(3, device=DEVICE))[0] == RANKS
            if not begun:
                sum_in_rank_order(ranks, given)
            ranks.sums.join()
        for x, y in zip(given, expected, strict=True):
            assert torch.equal(x, y), (number, dtype, sizes)
    given = [torch.full((4,), -0.0, device=DEVICE)]
    sum_in_rank_order(ranks, given)
    assert torch.signbit(given[0]).all()
    ranks.close()


def every(place: int, batch: int, heads: int, tokens: int, width: int, dtype: Any) -> torch.Tensor:
    """Numbers that a dtype holds, and neighbours of each kind differ in."""
    shape = (batch, heads, tokens, width)
    steps = [torch.arange(n, device=DEVICE) for n in shape]
    b, h, t, d = torch.meshgrid(*steps, indexing="ij")
    return ((101 * place + 61 * b + 37 * h + 7 * t + d) % 251).to(dtype)


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def name_of(number: int) -> str:
    """The same on all ranks; sizes that stay between those that grow."""
    return random.Random(number).choice(list(SIZES))


def who_does_not_wait_has_nothing() -> None:
    """What the other tests find is due to the wait."""
    ranks = Ranks(list(range(RANKS)), DEVICE)
    x = torch.ones(1000, device=DEVICE)
    for _ in range(2):  # both sides
        assert bool((ranks.all_gather(x) == 1).all())
    assert ranks.peers is not None
    ranks.peers.abort()
    if RANK == 0:
        torch.cuda._sleep(100 * LONGEST_CYCLES)
    parts = ranks.all_gather(2 * x)
    assert bool((parts[0] == (2 if RANK == 0 else 1)).all())
    ranks.close()


def a_failure_frees_who_waits() -> None:
    ranks = Ranks(list(range(RANKS)), DEVICE)
    for _ in range(2):
        x = torch.ones(1000, device=DEVICE)
        with ranks.call():
            assert ranks.sum(x)[0] == RANKS
        began = time.monotonic()
        with pytest.raises(ValueError, match="gives up"):
            give_up(ranks, x)
        assert time.monotonic() - began < FREED_SECONDS
    ranks.close()


def give_up(ranks: Ranks, x: torch.Tensor) -> None:
    with ranks.call():
        if RANK == 0:
            raise ValueError("rank 0 gives up")
        ranks.sum(x)
        torch.cuda.synchronize()  # waits in a kernel
        ranks.sum(x)


def nobody_waits_for_ever() -> None:
    ranks = Ranks(list(range(RANKS)), DEVICE, timedelta(seconds=2))
    x = torch.ones(1000, device=DEVICE)
    ranks.sum(x)
    began = time.monotonic()
    with pytest.raises((oomb.Error, TimeoutError), match="no answer within"):
        come_late(ranks, x, began)
    ranks.close()


def come_late(ranks: Ranks, x: torch.Tensor, began: float) -> None:
    with ranks.call():
        if RANK == 0:
            time.sleep(4)
        else:
            ranks.sum(x)
            torch.cuda.synchronize()
            assert 1 < time.monotonic() - began < 4
        ranks.sum(x)
        torch.cuda.synchronize()


def main() -> None:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo")
    for test in (
        all_arrives,
        heads_arrive,
        heads_arrive_beside_other_work,
        sums_are_those_in_rank_order,
        who_does_not_wait_has_nothing,
        a_failure_frees_who_waits,
        nobody_waits_for_ever,
    ):
        test()
        torch.cuda.synchronize()
        print(f"rank {RANK}: {test.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
