"""The backward for sm_90a, forced: against float64, bit by bit, and with pages of both dtypes."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from gradient_case import Case, Problem, check, check_bits

from oomb import _C

BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    _C.force_attention("sm90")
    yield
    _C.force_attention(None)


@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize(("head_dim", "page_size"), list(itertools.product([64, 128], [64, 128])))
def test_shapes(head_dim: int, page_size: int, lists: str) -> None:
    for group, chunk, past in [
        (7, 192, 3 * page_size + 17),
        (1, 77, page_size),
        (4, 300, 1500),
        (8, 1000, 2500),
    ]:
        check(
            Case(
                head_dim=head_dim,
                page_size=page_size,
                group=group,
                chunk=chunk,
                past=past,
                lists=lists,
                batch=2,
            )
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 128, 129, 1000])
def test_no_past(head_dim: int, chunk: int) -> None:
    check(Case(head_dim=head_dim, chunk=chunk))


@pytest.mark.parametrize("lists", ["dense", "per_head"])
def test_long_past(lists: str) -> None:
    check(Case(chunk=128, past=65536, kv_heads=1, group=7, lists=lists, budget=40))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("lists", ["dense", "shared"])
@pytest.mark.parametrize("limits", [{"window": 300}, {"documents": True}], ids=str)
def test_limits(head_dim: int, page_size: int, lists: str, limits: dict[str, int]) -> None:
    check(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            chunk=320,
            past=900,
            lists=lists,
            batch=2,
            **limits,
        )
    )


# Waves end at any listed page; without lists at 128 tokens, the kernels' key tile.
@pytest.mark.parametrize("dkv_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize(("head_dim", "page_size"), list(itertools.product([64, 128], [64, 128])))
def test_bits(head_dim: int, page_size: int, lists: str, dkv_dtype: torch.dtype) -> None:
    case = Case(
        head_dim=head_dim,
        page_size=page_size,
        group=7,
        chunk=500,
        past=1700,
        lists=lists,
        budget=5,
        batch=2,
        dkv_dtype=dkv_dtype,
    )
    pages_per_tile = 128 // page_size if lists == "dense" else 1
    check_bits(case, (4 * pages_per_tile, 9 * pages_per_tile))


@pytest.mark.parametrize("lists", ["dense", "shared"])
def test_bf16_pages(lists: str) -> None:
    check(Case(chunk=300, past=1500, group=7, batch=2, lists=lists, dkv_dtype=BF16))


@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize(("head_dim", "page_size"), list(itertools.product([64, 128], [64, 128])))
def test_without_order(head_dim: int, page_size: int, lists: str) -> None:
    for group, chunk, past in [(7, 192, 3 * page_size + 17), (4, 300, 1500), (8, 1000, 2500)]:
        check(
            Case(
                head_dim=head_dim,
                page_size=page_size,
                group=group,
                chunk=chunk,
                past=past,
                lists=lists,
                batch=2,
                deterministic=False,
            )
        )


# Too many queries for the L2: two stripes, each of which adds to the gradient pages, but one where
# these are bf16.
@pytest.mark.parametrize("dkv_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("page_size", [64, 128])
def test_stripes(page_size: int, dkv_dtype: torch.dtype) -> None:
    check(
        Case(
            page_size=page_size,
            group=7,
            kv_heads=1,
            chunk=5000,
            past=1000,
            deterministic=False,
            dkv_dtype=dkv_dtype,
        )
    )


@pytest.mark.parametrize("lists", ["dense", "shared"])
def test_pages_without_gradient(lists: str) -> None:
    case = Case(chunk=300, past=1500, group=7, lists=lists)
    problem = Problem(case)
    expected = problem.run()
    units = problem.dkv_table[:, 1].flatten().tolist()
    problem.dkv_table[:, 1] = -1
    problem.dkv_pool.fill_(1.0)
    dq, _, _ = problem.backward(expected.o, expected.lse)
    assert torch.equal(dq, expected.dq)
    for unit in units:
        assert (problem.dkv_pool[unit] == 1.0).all()


def test_gradients_are_added() -> None:
    problem = Problem(Case(chunk=300, past=1500, group=7))
    once = problem.run()
    problem.backward(once.o, once.lse)
    twice = problem.page_gradients()
    for sum_, part in zip(twice, (once.dk, once.dv), strict=True):
        assert torch.equal(sum_, 2 * part[:, :, : problem.case.past])
