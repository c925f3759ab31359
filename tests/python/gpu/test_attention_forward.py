"""The GPU's attention forward against float64, and what must not change a bit of it."""

import itertools
from typing import Any

import pytest
import torch
from attention_case import LIMITS, Case, Problem, pool_of

from oomb import _C

pytestmark = pytest.mark.gpu

PASTS = ("none", "page", "tail", "long")


def past_of(kind: str, page_size: int) -> int:
    return {"none": 0, "page": page_size, "tail": 3 * page_size + 17, "long": 65536}[kind]


def check(case: Case) -> None:
    problem = Problem(case)
    o, lse = problem.forward()
    expected, expected_lse = problem.reference()
    ours = (o.double() - expected).abs().max().item()
    theirs = (problem.sdpa().double() - expected).abs().max().item()
    assert ours <= 2 * theirs + 1e-6, f"error {ours}, PyTorch's {theirs}"
    cosine = torch.nn.functional.cosine_similarity(o.double().flatten(), expected.flatten(), dim=0)
    assert 1 - cosine.item() <= 1e-5
    empty = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert (o[empty] == 0).all()
    assert (lse.double() - expected_lse)[~empty].abs().max().item() <= 2e-3


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize(
    ("head_dim", "page_size"), list(itertools.product([64, 128, 256], [64, 128]))
)
def test_shapes(head_dim: int, page_size: int, lists: str, past: str) -> None:
    tokens = past_of(past, page_size)
    budget = 40 if past == "long" else 3
    for group, chunk in [(7, 192), (1, 128), (4, 300), (8, 77)]:
        check(
            Case(
                head_dim=head_dim,
                page_size=page_size,
                group=group,
                chunk=chunk,
                past=tokens,
                kv_heads=1 if past == "long" else 2,
                lists=lists,
                budget=budget,
                seed=group,
            )
        )


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
def test_long_chunk_and_batch(page_size: int, lists: str) -> None:
    check(Case(group=7, page_size=page_size, chunk=2048, past=1500, batch=2, lists=lists, budget=5))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("lists", ["dense", "per_head"])
@pytest.mark.parametrize("limits", [*LIMITS, dict(packed=True)], ids=str)
def test_masks(head_dim: int, page_size: int, lists: str, limits: dict[str, Any]) -> None:
    check(
        Case(
            group=7,
            head_dim=head_dim,
            page_size=page_size,
            chunk=450,
            past=7 * page_size + 17,
            batch=2,
            lists=lists,
            budget=4,
            **limits,
        )
    )


def test_rows_that_see_nothing() -> None:
    """A sequence whose keys all end before the chunk's documents begin."""
    problem = Problem(Case(group=7, chunk=200, past=300, documents=True, padding=True, batch=2))
    assert problem.num_keys is not None
    problem.num_keys.fill_(300)
    o, lse = problem.forward()
    expected, expected_lse = problem.reference()
    empty = expected_lse == float("-inf")
    assert empty.any() and not empty.all()
    assert torch.equal(lse == float("-inf"), empty)
    assert (o[empty] == 0).all()
    assert (o.double() - expected).abs().max().item() < 0.02


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
def test_waves_change_no_bit(head_dim: int, page_size: int, lists: str) -> None:
    case = Case(
        group=7,
        head_dim=head_dim,
        page_size=page_size,
        chunk=330,
        past=11 * page_size + 5,
        batch=2,
        lists=lists,
        budget=6,
        documents=True,
    )
    problem = Problem(case)
    o, lse = problem.forward()
    for borders in [(0,), (1,), (3, 4), (4, 9), (2, 2, 11)]:
        again, again_lse = problem.forward(borders)
        assert torch.equal(o, again) and torch.equal(lse, again_lse), borders


@pytest.mark.parametrize("lists", ["dense", "per_head"])
def test_slots_and_repetition_change_no_bit(lists: str) -> None:
    case = Case(group=7, chunk=1000, past=5000, lists=lists, budget=9)
    o, lse = Problem(case).forward()
    for slot_seed in range(3):
        again, again_lse = Problem(case, slot_seed=slot_seed).forward()
        assert torch.equal(o, again) and torch.equal(lse, again_lse)


def test_full_list_equals_dense() -> None:
    dense = Problem(Case(group=7, chunk=500, past=1300))
    listed = Problem(Case(group=7, chunk=500, past=1300, lists="shared", budget=11))
    assert torch.equal(dense.q, listed.q)
    assert torch.equal(dense.forward()[0], listed.forward()[0])


def test_pool_past_two_to_the_31_elements() -> None:
    """Pages at both ends of a pool of more than 8 GiB."""
    problem = Problem(Case(group=7, chunk=256, past=600))
    expected, expected_lse = problem.forward()
    problem.move_apart(9 * 2**30)
    o, lse = problem.forward()
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
def test_cpu_kernels_agree(lists: str) -> None:
    problem = Problem(Case(group=7, chunk=150, past=700, lists=lists, documents=True))
    o, lse = problem.forward()
    first_key = problem.first_key
    assert first_key is not None
    pool = problem.pool.cpu()
    chunk = _C.Chunk(
        q=problem.q.cpu(),
        k=problem.k.cpu(),
        v=problem.v.cpu(),
        scale=problem.scale,
        visibility=_C.Visibility(first_key=first_key.cpu()),
    )
    selection = problem.selection
    past = _C.PastPages(
        page_size=problem.case.page_size,
        pool=pool_of(pool),
        block_table=problem.block_table.cpu(),
        num_tokens=problem.case.past,
        selection=None if selection is None else selection.cpu(),
    )
    cpu_o = torch.empty_like(o, device="cpu")
    cpu_lse = torch.empty_like(lse, device="cpu")
    _C.attention_forward(chunk=chunk, past=past, output=_C.Output(o=cpu_o, lse=cpu_lse))
    expected, _ = problem.reference()
    theirs = (problem.sdpa().double() - expected).abs().max().item()
    assert (o.cpu().double() - cpu_o.double()).abs().max().item() <= 2 * theirs
    seen = cpu_lse != float("-inf")
    assert torch.equal(lse.cpu() != float("-inf"), seen)
    assert (lse.cpu() - cpu_lse)[seen].abs().max().item() <= 2e-3
