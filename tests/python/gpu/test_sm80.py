"""The tensor-core kernels for every GPU since sm_80, forced."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from gradient_case import Case, Problem, check, check_bits

from oomb import _C

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    _C.force_attention("sm80")
    yield
    _C.force_attention(None)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize(
    ("head_dim", "page_size"), list(itertools.product([64, 96, 128], [64, 128]))
)
def test_shapes(head_dim: int, page_size: int, lists: str, dtype: torch.dtype) -> None:
    for group, chunk, past in [(7, 192, 3 * page_size + 17), (1, 77, page_size), (4, 300, 1500)]:
        check(
            Case(
                head_dim=head_dim,
                page_size=page_size,
                group=group,
                chunk=chunk,
                past=past,
                lists=lists,
                dtype=dtype,
                batch=2,
            )
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 128, 129, 1000])
def test_no_past(head_dim: int, chunk: int) -> None:
    check(Case(head_dim=head_dim, chunk=chunk))


@pytest.mark.parametrize("lists", ["dense", "per_head"])
def test_long_past(lists: str) -> None:
    check(Case(chunk=256, past=20000, kv_heads=1, group=2, lists=lists, budget=40))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("lists", ["dense", "per_head"])
@pytest.mark.parametrize(
    "limits",
    [
        dict(window=1),
        dict(window=100),
        dict(window=700),
        dict(documents=True),
        dict(padding=True),
        dict(documents=True, padding=True, window=250),
    ],
    ids=str,
)
def test_masks(head_dim: int, page_size: int, lists: str, limits: dict[str, int]) -> None:
    check(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            chunk=450,
            past=7 * page_size + 17,
            batch=2,
            lists=lists,
            budget=4,
            **limits,  # type: ignore[arg-type]
        )
    )


def test_rows_that_see_nothing() -> None:
    """A sequence whose keys all end before the chunk's documents begin."""
    problem = Problem(Case(chunk=200, past=300, documents=True, batch=2))
    problem.num_keys = torch.full((2,), 300, device="cuda", dtype=torch.int32)
    ours, expected = problem.run(), problem.dense(torch.float64)
    empty = expected.lse == float("-inf")
    assert empty.any() and not empty.all()
    assert torch.equal(ours.lse == float("-inf"), empty)
    assert (ours.o[empty] == 0).all() and (ours.dq[empty] == 0).all()
    for name, value in expected.tensors().items():
        if name != "lse":
            assert (ours.tensors()[name].double() - value).abs().max().item() < 0.05, name


@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
def test_gradient_dtypes(dkv_dtype: torch.dtype) -> None:
    check(Case(chunk=300, past=1000, dkv_dtype=dkv_dtype, lists="shared", budget=5))


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    case = Case(chunk=256, past=256, dkv_dtype=BF16)
    problem, exact = Problem(case), Problem(Case(chunk=256, past=256))
    o, lse = problem.forward()
    exact.backward(o, lse)
    target = torch.stack(exact.page_gradients())
    total = torch.zeros_like(target)
    seeds = 64
    for seed in range(seeds):
        problem.dkv_pool.zero_()
        problem.backward(o, lse, rounding_seed=seed)
        total += torch.stack(problem.page_gradients()).float()
    error = (total / seeds - target).abs().mean() / target.abs().mean()
    nearest = (target.bfloat16().float() - target).abs().mean() / target.abs().mean()
    assert error < 0.5 * nearest  # an average of 64 draws; a bias would stay
    last = problem.dkv_pool.clone()
    problem.dkv_pool.zero_()
    problem.backward(o, lse, rounding_seed=seeds - 1)
    assert torch.equal(problem.dkv_pool, last)
    problem.dkv_pool.zero_()
    problem.backward(o, lse, rounding_seed=0)
    assert not torch.equal(problem.dkv_pool, last)


def test_gradients_are_added() -> None:
    problem = Problem(Case(chunk=200, past=300))
    o, lse = problem.forward()
    problem.backward(o, lse)
    once = problem.dkv_pool.clone()
    problem.backward(o, lse)
    torch.testing.assert_close(problem.dkv_pool, 2 * once, rtol=1e-6, atol=1e-6)


def test_page_without_gradient() -> None:
    case = Case(chunk=200, past=600, lists="shared", budget=4)
    full, partial = Problem(case), Problem(case)
    partial.dkv_table[:, 2] = -1
    expected = full.run()
    o, lse = partial.forward()
    dq, _, _ = partial.backward(o, lse)
    assert torch.equal(dq, expected.dq)
    for page in (0, 1, 3, 4):
        units = full.dkv_table[0, page].long()
        assert torch.equal(partial.dkv_pool[units], full.dkv_pool[units])
    assert (partial.dkv_pool[full.dkv_table[0, 2].long()] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
def test_bits(head_dim: int, page_size: int, lists: str) -> None:
    case = Case(
        head_dim=head_dim,
        page_size=page_size,
        chunk=330,
        past=11 * page_size + 5,
        batch=2,
        lists=lists,
        budget=6,
        dkv_dtype=BF16,
        documents=True,
    )
    for borders in [(0,), (1,), (3, 4), (2, 2, 11)]:
        check_bits(case, borders)


def test_full_list_equals_dense() -> None:
    dense = Problem(Case(chunk=500, past=1300)).run().tensors()
    listed = Problem(Case(chunk=500, past=1300, lists="shared", budget=11)).run().tensors()
    for name, value in dense.items():
        assert torch.equal(listed[name], value), name


def test_pools_past_two_to_the_31_elements() -> None:
    """Pages at both ends of pools of more than 8 GiB."""
    problem = Problem(Case(chunk=256, past=600))
    expected = problem.run().tensors()
    kv, dkv = problem.pool, problem.dkv_pool
    table, dkv_table = problem.block_table.clone(), problem.dkv_table.clone()
    slots = 9 * 2**30 // kv[0].nbytes
    units = 9 * 2**30 // dkv[0].nbytes
    problem.pool = torch.empty(slots, *kv.shape[1:], device="cuda", dtype=kv.dtype)
    problem.dkv_pool = torch.empty(units, *dkv.shape[1:], device="cuda", dtype=dkv.dtype)
    for page in range(table.shape[1]):
        slot = slots - 1 - page if page % 2 == 0 else page
        problem.pool[slot] = kv[int(table[0, page])]
        problem.block_table[0, page] = slot
        for kind in range(2):
            problem.dkv_table[0, page, kind] = (
                units - 1 - 2 * page - kind if page % 2 else 2 * page + kind
            )
    for name, value in problem.run().tensors().items():
        assert torch.equal(value, expected[name]), name
    assert dkv_table.shape == problem.dkv_table.shape
