"""The tensor-core kernels, forced: those of Hopper and those for every GPU since sm_80."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_case import LIMITS, Case, Problem, bytes_on_gpu, check, check_bits
from torch import Tensor

from oomb import _C

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.gpu
on_sm90 = pytest.mark.parametrize("implementation", ["sm90"], indirect=True)
on_sm80 = pytest.mark.parametrize("implementation", ["sm80"], indirect=True)
in_its_tiles = pytest.mark.parametrize(
    ("implementation", "head_dim"),
    [("sm80", dim) for dim in (64, 96, 128, 256, 512)] + [("sm80-small", d) for d in (256, 512)],
    indirect=["implementation"],
)
lists_of_pages = pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
dims_and_pages = pytest.mark.parametrize(
    ("head_dim", "page_size"), list(itertools.product([64, 128, 256], [64, 128]))
)
in_both_orders = pytest.mark.parametrize(
    "deterministic", [True, False], ids=["ordered", "any-order"]
)
ONE_HEAD: dict[str, Any] = dict(kv_heads=1, group=20, chunk=4000)


@pytest.fixture(autouse=True, params=["sm90", "sm80"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    _C.force_attention(request.param)
    yield request.param
    _C.force_attention(None)


def check_shapes(case: Case) -> None:
    page = case.page_size
    for group, chunk, past in [
        (7, 192, 3 * page + 17),
        (1, 77, page),
        (4, 300, 1500),
        (8, 1000, 2500),
    ]:
        check(dataclasses.replace(case, group=group, chunk=chunk, past=past, batch=2))


@in_both_orders
@lists_of_pages
@dims_and_pages
def test_shapes(head_dim: int, page_size: int, lists: str, deterministic: bool) -> None:
    check_shapes(
        Case(head_dim=head_dim, page_size=page_size, lists=lists, deterministic=deterministic)
    )


@in_both_orders
@dims_and_pages
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
def test_pages_of_few_and_of_many_readers(
    head_dim: int, page_size: int, dkv_dtype: torch.dtype, deterministic: bool
) -> None:
    """34 blocks of queries read the first page, 17 the second, 9, 5, 3, 2, 1 and 1 those behind."""
    check(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            group=2,
            chunk=33 * page_size + 5,
            past=8 * page_size - 3,
            lists="ladder",
            budget=8,
            dkv_dtype=dkv_dtype,
            deterministic=deterministic,
        )
    )


@in_its_tiles
@in_both_orders
@lists_of_pages
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_shapes_of_sm80(
    head_dim: int, page_size: int, lists: str, dtype: torch.dtype, deterministic: bool
) -> None:
    check_shapes(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            lists=lists,
            dtype=dtype,
            deterministic=deterministic,
        )
    )


@in_both_orders
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 128, 129, 1000])
def test_no_past(head_dim: int, chunk: int, deterministic: bool) -> None:
    check(Case(head_dim=head_dim, chunk=chunk, deterministic=deterministic))


@in_both_orders
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("lists", ["dense", "per_head"])
def test_long_past(lists: str, head_dim: int, deterministic: bool) -> None:
    check(
        Case(
            head_dim=head_dim,
            chunk=128,
            past=65536,
            kv_heads=1,
            group=7,
            lists=lists,
            budget=40,
            deterministic=deterministic,
        )
    )


@in_both_orders
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared"])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_long_chunk(
    head_dim: int, page_size: int, lists: str, dkv_dtype: torch.dtype, deterministic: bool
) -> None:
    """Dozens of key tiles of the chunk itself add to a row's dQ, dozens of queries to a page.

    More queries than the L2 takes: Hopper's kernels go through them in two stripes where dQ has no
    order and pages are fp32.
    """
    check(
        Case(
            head_dim=head_dim,
            page_size=page_size,
            group=7,
            kv_heads=1,
            chunk=5000,
            past=1000,
            lists=lists,
            budget=4,
            dkv_dtype=dkv_dtype,
            deterministic=deterministic,
        )
    )


@in_both_orders
@dims_and_pages
@pytest.mark.parametrize("lists", ["dense", "per_head"])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
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


@in_its_tiles
@in_both_orders
@pytest.mark.parametrize("softcap", [1.0, 50.0])
@pytest.mark.parametrize("limits", [{}, dict(documents=True, padding=True, window=250)], ids=str)
@lists_of_pages
@pytest.mark.parametrize("page_size", [64, 128])
def test_soft_caps(
    head_dim: int,
    page_size: int,
    lists: str,
    limits: dict[str, Any],
    softcap: float,
    deterministic: bool,
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
            softcap=softcap,
            deterministic=deterministic,
            **limits,
        )
    )


@on_sm80
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("lists", ["dense", "per_head"])
def test_bits_of_soft_caps(lists: str, head_dim: int) -> None:
    case = Case(head_dim=head_dim, chunk=330, past=1413, lists=lists, budget=6, softcap=5.0)
    for tiles in [(1,), (3, 4)]:
        check_bits(case, tiles)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_rows_that_see_nothing(head_dim: int) -> None:
    """A sequence whose keys all end before the chunk's documents begin."""
    problem = Problem(Case(chunk=200, past=300, head_dim=head_dim, documents=True, batch=2))
    problem.num_keys = torch.full((2,), 300, device="cuda", dtype=torch.int32)
    ours, expected = problem.run(), problem.dense(torch.float64)
    empty = expected.lse == float("-inf")
    assert empty.any() and not empty.all()
    assert torch.equal(ours.lse == float("-inf"), empty)
    assert (ours.o[empty] == 0).all() and (ours.dq[empty] == 0).all()
    for name, value in expected.tensors().items():
        if name != "lse":
            assert (ours.tensors()[name].double() - value).abs().max().item() < 0.05, name


@in_both_orders
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
@lists_of_pages
@pytest.mark.parametrize("head_dim", [128, 256])
def test_gradient_dtypes(
    head_dim: int, lists: str, dkv_dtype: torch.dtype, deterministic: bool
) -> None:
    check(
        Case(
            head_dim=head_dim,
            chunk=300,
            past=1500,
            group=7,
            batch=2,
            lists=lists,
            budget=5,
            dkv_dtype=dkv_dtype,
            deterministic=deterministic,
        )
    )


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


@pytest.mark.parametrize(
    ("shape", "deterministic"),
    [
        (dict(chunk=200), True),
        (dict(chunk=200), False),
        (dict(chunk=200, lists="shared", budget=4), True),
        (dict(chunk=200, lists="shared", budget=4), False),
        (ONE_HEAD, True),
    ],
    ids=str,
)
def test_page_without_gradient(shape: dict[str, Any], deterministic: bool) -> None:
    case = Case(past=600, deterministic=deterministic, **shape)
    full, partial = Problem(case), Problem(case)
    partial.dkv_table[:, 2] = -1
    expected = full.run()
    o, lse = partial.forward()
    dq, _, _ = partial.backward(o, lse)
    if deterministic:
        assert torch.equal(dq, expected.dq)
    else:
        torch.testing.assert_close(dq, expected.dq, rtol=2**-7, atol=1e-4)
    for page in (0, 1, 3, 4):
        units = full.dkv_table[0, page].long()
        assert torch.equal(partial.dkv_pool[units], full.dkv_pool[units])
    assert (partial.dkv_pool[full.dkv_table[0, 2].long()] == 0).all()


# Waves may end at any of the kernels' key tiles: 128 tokens of dense attention on Hopper, a page
# elsewhere.
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
@lists_of_pages
@dims_and_pages
def test_bits(
    implementation: str,
    head_dim: int,
    page_size: int,
    lists: str,
    dkv_dtype: torch.dtype,
    documents: bool,
) -> None:
    case = Case(
        head_dim=head_dim,
        page_size=page_size,
        group=7,
        chunk=330,
        past=11 * 128 + 5,
        batch=2,
        lists=lists,
        budget=6,
        dkv_dtype=dkv_dtype,
        documents=documents,
    )
    pages = 128 // page_size if implementation == "sm90" and lists == "dense" else 1
    for tiles in [(0,), (1,), (3, 4), (2, 2, 11)]:
        check_bits(case, tuple(pages * tile for tile in tiles))


@on_sm90
@pytest.mark.parametrize(
    "shape",
    [
        dict(**ONE_HEAD, past=11 * 128 + 5),
        dict(**ONE_HEAD, past=11 * 128 + 5, padding=True),
        dict(**ONE_HEAD, past=11 * 128 + 5, documents=True),
        dict(**ONE_HEAD, past=11 * 128 + 5, window=3000),
        dict(batch=2, kv_heads=2, group=6, chunk=4000, past=30 * 128 + 5),
    ],
    ids=["one head", "padding", "documents", "window", "four heads"],
)
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
@dims_and_pages
def test_blocks_that_close(
    head_dim: int,
    page_size: int,
    dkv_dtype: torch.dtype,
    shape: dict[str, Any],
) -> None:
    """Past tiles are done once for most queries, and at last for the others. In waves without the
    chunk itself and at head dim 256 they come to a page at the same time: about as many units as
    run at once."""
    case = Case(head_dim=head_dim, page_size=page_size, dkv_dtype=dkv_dtype, **shape)
    check(case)
    pages = 128 // page_size
    check_bits(case, (3 * pages, 4 * pages))


def test_bits_do_not_depend_on_other_sequences() -> None:
    """Nor on how many heads a launch has: parts of a head's sums are the same."""
    both = Problem(Case(batch=2, **ONE_HEAD, past=11 * 128 + 5))
    expected = both.run().tensors()
    alone = copy.copy(both)
    alone.case = dataclasses.replace(both.case, batch=1)
    for name in ("q", "k", "v", "d_o", "d_lse", "block_table", "dkv_table"):
        setattr(alone, name, getattr(both, name)[:1])
    for name, value in alone.run().tensors().items():
        assert torch.equal(value, expected[name][:1]), name


def test_waves_in_any_order() -> None:
    """All but dQ, whose sum is the same up to rounding."""
    problem = Problem(Case(chunk=330, past=1400, lists="shared", budget=6, deterministic=False))
    once, waves = problem.run().tensors(), problem.run((1, 5, 9)).tensors()
    for name, value in once.items():
        if name == "dq":
            torch.testing.assert_close(waves[name], value, rtol=2**-7, atol=1e-4)
        else:
            assert torch.equal(waves[name], value), name


@pytest.mark.parametrize(("kv_heads", "group", "chunk"), [(5, 1, 64), (8, 1, 130), (1, 7, 1024)])
def test_more_blocks_than_fit(kv_heads: int, group: int, chunk: int) -> None:
    """Blocks that wait for each other's dQ: more of them than run at once, of several heads."""
    case = Case(kv_heads=kv_heads, group=group, chunk=chunk, past=40_000, head_dim=64)
    check_bits(case, (7, 200))


@in_its_tiles
@pytest.mark.parametrize("limits", [{}, dict(window=3000), dict(documents=True)], ids=str)
@lists_of_pages
def test_parted_tiles(head_dim: int, lists: str, limits: dict[str, Any]) -> None:
    """More tiles of queries than run at once: done in pieces, they have the bits of the whole."""
    problem = Problem(
        Case(
            kv_heads=4,
            group=7,
            chunk=1300,
            past=6005,
            head_dim=head_dim,
            lists=lists,
            budget=40,
            **limits,
        )
    )
    asked = []

    def workspace(size: int) -> Tensor:
        asked.append(size)
        return bytes_on_gpu(size)

    o, lse = problem.forward(workspace=None)
    for borders in ((), (3,), (20, 21)):
        parted, parted_lse = problem.forward(borders, workspace)
        assert torch.equal(parted, o) and torch.equal(parted_lse, lse), borders
    assert asked, "nothing was parted"


def test_full_list_equals_dense(implementation: str) -> None:
    """All but what is summed in another order: dQ, on Hopper also dK and dV of the chunk."""
    reordered = {"sm90": {"dq", "dk", "dv"}, "sm80": {"dq"}}[implementation]
    dense = Problem(Case(chunk=500, past=1300)).run().tensors()
    listed = Problem(Case(chunk=500, past=1300, lists="shared", budget=11)).run().tensors()
    for name, value in dense.items():
        if name in reordered:
            torch.testing.assert_close(listed[name], value, rtol=2**-7, atol=1e-4)
        else:
            assert torch.equal(listed[name], value), name


def test_pools_past_two_to_the_31_elements() -> None:
    """Pages at both ends of pools of more than 8 GiB."""
    problem = Problem(Case(chunk=256, past=600))
    expected = problem.run().tensors()
    problem.move_apart(9 * 2**30)
    for name, value in problem.run().tensors().items():
        assert torch.equal(value, expected[name]), name
