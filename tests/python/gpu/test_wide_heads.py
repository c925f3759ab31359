"""Heads of 512, whose columns two warps share, and heads of 256 and 512 in small tiles."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_case import LIMITS, Case, Problem, check, check_bits

from oomb import _C

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.gpu
in_both_orders = pytest.mark.parametrize(
    "deterministic", [True, False], ids=["ordered", "any-order"]
)


@pytest.fixture(
    autouse=True,
    params=[("sm80", 512), ("sm80-small", 256), ("sm80-small", 512)],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def head_dim(request: pytest.FixtureRequest) -> Iterator[int]:
    """On the kernels of that name; another call raises."""
    name, size = request.param
    if name == "sm80" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a block has 227 KiB of shared memory since compute capability 9.0")
    _C.force_attention(name)
    yield size
    _C.force_attention(None)


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 63, 64, 65, 129, 1000])
def test_no_past(head_dim: int, chunk: int) -> None:
    check(Case(head_dim=head_dim, chunk=chunk))


@pytest.mark.parametrize("lists", ["dense", "per_head"])
def test_long_past(head_dim: int, lists: str) -> None:
    check(
        Case(head_dim=head_dim, chunk=128, past=65536, kv_heads=1, group=7, lists=lists, budget=40)
    )


@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared"])
@pytest.mark.parametrize("page_size", [64, 128])
def test_long_chunk(head_dim: int, page_size: int, lists: str, dkv_dtype: torch.dtype) -> None:
    check(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            group=7,
            kv_heads=1,
            chunk=2500,
            past=1000,
            lists=lists,
            budget=4,
            dkv_dtype=dkv_dtype,
        )
    )


@in_both_orders
@pytest.mark.parametrize(
    ("page_size", "lists", "limits"),
    list(itertools.product([64, 128], ["dense", "per_head"], LIMITS)),
    ids=str,
)
def test_masks(
    head_dim: int, page_size: int, lists: str, limits: dict[str, Any], deterministic: bool
) -> None:
    check(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            chunk=450,
            past=7 * page_size + 17,
            batch=2,
            lists=lists,
            budget=4,
            deterministic=deterministic,
            **limits,
        )
    )


def test_rows_that_see_nothing(head_dim: int) -> None:
    """A sequence whose keys all end before the chunk's documents begin."""
    problem = Problem(Case(chunk=200, past=300, head_dim=head_dim, documents=True, batch=2))
    problem.num_keys = torch.full((2,), 300, device="cuda", dtype=torch.int32)
    ours, expected = problem.run(), problem.dense(torch.float64)
    empty = expected.lse == float("-inf")
    assert empty.any() and not empty.all()
    assert torch.equal(ours.lse == float("-inf"), empty)
    assert (ours.o[empty] == 0).all() and (ours.dq[empty] == 0).all()


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize("page_size", [64, 128])
def test_waves_change_no_bit(
    head_dim: int, page_size: int, lists: str, dkv_dtype: torch.dtype, documents: bool
) -> None:
    case = Case(
        head_dim=head_dim,
        page_size=page_size,
        group=7,
        chunk=330,
        past=11 * page_size + 5,
        batch=2,
        lists=lists,
        budget=6,
        dkv_dtype=dkv_dtype,
        documents=documents,
    )
    for pages in [(0,), (1,), (3, 4), (2, 2, 11)]:
        check_bits(case, pages)
