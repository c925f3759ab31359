"""CPU kernels against ordinary float64 attention with autograd."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from paged_case import Case, Problem, pool_of, relative

from oomb import _C

CASES = {
    "plain": Case(),
    "one_token": Case(chunk=1),
    "capped": Case(num_past=3 * 16 + 9, softcap=1.5),
    "capped_window": Case(num_past=3 * 16 + 9, window=20, softcap=2.5),
    "one_token_no_past": Case(chunk=1, num_past=0),
    "no_past": Case(num_past=0),
    "one_page": Case(num_past=16),
    "tail_in_past": Case(num_past=3 * 16 + 9),
    "chunk_below_page": Case(chunk=7),
    "mha": Case(query_heads=3, kv_heads=3),
    "gqa_7": Case(query_heads=7, kv_heads=1),
    "gqa_4": Case(query_heads=8, kv_heads=2, batch=2),
    "odd_head_dim": Case(head_dim=21),
    "head_dim_80": Case(head_dim=80, page_size=32, chunk=70, num_past=100),
    "window": Case(window=20, num_past=3 * 16 + 9),
    "window_of_one": Case(window=1),
    "window_inside_chunk": Case(window=5, chunk=50),
    "documents": Case(batch=2, documents=((0, 13, 50, 61, 80), (0, 48, 49))),
    "padding": Case(batch=3, num_keys=(88, 61, 20)),
    "empty_sequence": Case(batch=2, num_keys=(88, 0)),
    "nothing_to_see": Case(batch=2, num_keys=(88, 30), documents=((0,), (0, 40))),
    "some_see_nothing": Case(batch=2, num_keys=(88, 60), documents=((0,), (0, 62))),
    "selection": Case(num_past=6 * 16, budget=3),
    "selection_per_head": Case(num_past=6 * 16, budget=3, selection_heads=2, batch=2),
    "selection_padded": Case(num_past=6 * 16, budget=8),
    "selection_tail": Case(num_past=5 * 16 + 3, budget=2, window=70),
    "some_without_gradient": Case(num_past=6 * 16, no_gradient_pages=(0, 3)),
    "all_together": Case(
        batch=2, query_heads=6, kv_heads=2, chunk=53, num_past=6 * 16 + 5, window=60, budget=4,
        documents=((0, 20, 110), (0, 101, 120)), num_keys=(154, 118), selection_heads=2,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = _C.num_threads()
    yield
    _C.set_num_threads(before)


def errors(problem: Problem) -> dict[str, float]:
    expected = problem.reference()
    o, lse = problem.forward()
    dq, dk, dv = problem.backward(o, lse)
    got = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: relative(got[name], expected[name]) for name in expected}


@pytest.mark.parametrize("name", CASES)
def test_float64_is_exact(name: str) -> None:
    for key, error in errors(Problem(CASES[name])).items():
        assert error < 2e-15 * 20, (key, error)


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    case = dataclasses.replace(CASES[name], dtype=torch.float32, dkv_dtype=torch.float32)
    for key, error in errors(Problem(case)).items():
        assert error < 2e-6, (key, error)


@pytest.mark.parametrize("dkv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "padding", "all_together"])
def test_half_storage(name: str, dtype: torch.dtype, dkv_dtype: torch.dtype) -> None:
    # Inputs are exact in both; what differs is the rounding of outputs and gradient pages.
    case = dataclasses.replace(CASES[name], dtype=dtype, dkv_dtype=dkv_dtype)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    for key, error in errors(Problem(case)).items():
        bound = unit[dtype] * (2 if key in ("dq", "dk", "dv") else 1)
        if key in ("dk", "dv"):
            bound = max(bound, 2 * unit[torch.bfloat16] if dkv_dtype == torch.bfloat16 else 0)
        assert error < bound, (key, error)


@pytest.mark.parametrize("name", ["plain", "tail_in_past", "documents", "all_together"])
def test_waves_and_slots_change_no_bit(name: str) -> None:
    for dtype, dkv_dtype in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ]:
        case = dataclasses.replace(CASES[name], dtype=dtype, dkv_dtype=dkv_dtype)
        problem = Problem(case)
        o, lse = problem.forward()
        gradients = problem.backward(o, lse)
        runs = [(0, (border,)) for border in range(case.pages + 1)]
        runs += [(0, tuple(range(1, case.pages))), (5, ()), (6, (1, 2))]
        for slot_seed, borders in runs:
            other = Problem(case, slot_seed)
            o_other, lse_other = other.forward(borders)
            assert torch.equal(o_other, o) and torch.equal(lse_other, lse)
            for a, b in zip(other.backward(o, lse, borders), gradients, strict=True):
                assert torch.equal(a, b), (dtype, slot_seed, borders)


@pytest.mark.parametrize("name", ["gqa_7", "gqa_4", "all_together"])
def test_threads_change_no_bit(name: str) -> None:
    case = dataclasses.replace(CASES[name], dtype=torch.float32, dkv_dtype=torch.float32)
    results = []
    for count in (1, 2, 3, 8):
        _C.set_num_threads(count)
        problem = Problem(case)
        o, lse = problem.forward()
        results.append((o, lse, *problem.backward(o, lse)))
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["tail_in_past", "capped", "window", "gqa_7", "all_together"])
def test_nan_in_a_query_is_seen_in_its_row_alone(name: str, dtype: torch.dtype) -> None:
    problem = Problem(dataclasses.replace(CASES[name], dtype=dtype, dkv_dtype=dtype))
    o, lse = problem.forward()
    assert not o.isnan().any()
    hit = torch.zeros(lse.shape, dtype=torch.bool)
    hit[0, -1, 5] = hit[0, 0, 33] = True
    problem.q[hit] = torch.nan
    for borders in [(), (1,)]:
        o_hit, lse_hit = problem.forward(borders)
        assert o_hit[hit].isnan().all() and lse_hit[hit].isnan().all()
        assert torch.equal(o_hit[~hit], o[~hit]) and torch.equal(lse_hit[~hit], lse[~hit])
    dq, dk, _ = problem.backward(o_hit, lse_hit)
    assert dq[hit].isnan().all() and not dq[~hit].isnan().any()
    assert dk.isnan().any()  # it does not go unnoticed


@pytest.mark.parametrize("name", ["empty_sequence", "nothing_to_see", "some_see_nothing"])
def test_queries_without_a_key_may_hold_anything(name: str) -> None:
    problem = Problem(CASES[name])
    o, lse = problem.forward()
    expected = problem.backward(o, lse)
    nothing = lse == -torch.inf
    assert nothing.any()
    problem = Problem(CASES[name])
    for tensor in (problem.q, problem.d_o, problem.d_lse):
        tensor[nothing] = torch.nan
    o_other, lse_other = problem.forward()
    assert torch.equal(o_other, o) and torch.equal(lse_other, lse)
    for got, want in zip(problem.backward(o, lse), expected, strict=True):
        assert torch.equal(got, want)


def test_full_selection_is_dense() -> None:
    dense = Problem(Case(num_past=5 * 16 + 3, dtype=torch.float32, dkv_dtype=torch.float32))
    listed = Problem(
        Case(num_past=5 * 16 + 3, budget=9, dtype=torch.float32, dkv_dtype=torch.float32)
    )
    o, lse = dense.forward()
    o_listed, lse_listed = listed.forward()
    assert torch.equal(o, o_listed) and torch.equal(lse, lse_listed)
    for a, b in zip(dense.backward(o, lse), listed.backward(o, lse), strict=True):
        assert torch.equal(a, b)


def test_gradient_pages_are_added_to() -> None:
    case = Case(num_past=3 * 16)
    problem = Problem(case)
    o, lse = problem.forward()
    _, dk, dv = problem.backward(o, lse)
    _, dk_twice, dv_twice = problem.backward(o, lse)
    n = case.num_past
    torch.testing.assert_close(dk_twice[:, :, :n], 2 * dk[:, :, :n], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(dv_twice[:, :, :n], 2 * dv[:, :, :n], rtol=1e-14, atol=1e-14)
    assert torch.equal(dk_twice[:, :, n:], dk[:, :, n:])


def test_stochastic_rounding_has_no_bias() -> None:
    case = Case(dtype=torch.float32, dkv_dtype=torch.bfloat16)
    exact = Problem(dataclasses.replace(case, dkv_dtype=torch.float32))
    o, lse = exact.forward()
    dk = exact.backward(o, lse)[1][:, :, : case.num_past]
    runs = 400
    total = torch.zeros_like(dk)
    problem = Problem(case)
    empty = problem.dkv_pool.clone()
    for seed in range(runs):
        problem.dkv_pool.copy_(empty)
        rounded = problem.backward(o, lse, seed=seed)[1][:, :, : case.num_past]
        assert ((rounded - dk).abs() <= dk.abs() * 2**-7).all()
        total += rounded
    # A step is at most 2^-7 of the value; the mean's deviation is at most half a step / sqrt(runs).
    deviation = (total / runs - dk) / (dk.abs() * 2**-7 * 0.5 / runs**0.5)
    assert deviation.abs().max() < 6
    assert deviation.mean().abs() < 6 / dk.numel() ** 0.5
    nearest = dk.to(torch.bfloat16).float()
    assert relative(total / runs, dk) < 0.2 * relative(nearest, dk)


def test_page_write_round_trip() -> None:
    case = Case(batch=2, chunk=40, num_past=0)
    problem = Problem(case)
    num_rows = torch.tensor([40, 21], dtype=torch.int32)
    pool = torch.full((8, 2, case.kv_heads, case.page_size, case.head_dim), 9.0).double()
    before = pool.clone()
    slots = torch.tensor([[5, 1, 6], [0, 7, -1]], dtype=torch.int32)
    summary = torch.full((2, 3, case.kv_heads, case.head_dim), 9.0).double()
    arguments = {
        "k": problem.k, "v": problem.v, "pool": pool_of(pool), "summary": summary,
        "slots": slots, "page_size": 16, "num_rows": num_rows,
    }  # fmt: skip
    _C.page_write(page_begin=0, page_end=2, **arguments)
    assert torch.equal(pool[6], before[6])
    _C.page_write(page_begin=2, page_end=3, **arguments)
    for b, page in itertools.product(range(2), range(3)):
        tokens = slice(page * 16, min(page * 16 + 16, int(num_rows[b])))
        slot, count = int(slots[b, page]), tokens.stop - tokens.start
        if slot < 0:
            continue
        assert torch.equal(pool[slot, 0, :, :count], problem.k[b, :, tokens])
        assert torch.equal(pool[slot, 1, :, :count], problem.v[b, :, tokens])
        assert not pool[slot, :, :, count:].any()  # padding, and what is behind the last token
        mean = problem.k[b, :, tokens].mean(1)
        torch.testing.assert_close(summary[b, page], mean, rtol=1e-14, atol=1e-14)
    untouched = [2, 3, 4]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("dkv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_page_gradient_read(dtype: torch.dtype, dkv_dtype: torch.dtype) -> None:
    dk = torch.randn(2, 3, 40, 16).to(dtype)
    dv = torch.randn(2, 3, 40, 16).to(dtype)
    pool = torch.randn(12, 3, 16, 16).to(dkv_dtype)
    table = torch.tensor([[[3, 4], [-1, -1], [0, 9]], [[1, 2], [7, 11], [5, 6]]], dtype=torch.int32)
    expected = [dk.clone().float(), dv.clone().float()]
    for kind, b, page in itertools.product(range(2), range(2), range(1, 3)):
        if table[b, page, kind] >= 0:
            rows = slice(page * 16, min(page * 16 + 16, 40))
            gradient = pool[table[b, page, kind], :, : rows.stop - rows.start].float()
            expected[kind][b, :, rows] += 2.5 * gradient
    _C.page_gradient_read(
        dk=dk, dv=dv, gradients=_C.GradientPages(
            pool=pool_of(pool), table=table, dtype=str(dkv_dtype).removeprefix("torch.")
        ), page_begin=1, page_end=3, page_size=16, scale=2.5,
    )  # fmt: skip
    for got, want in zip((dk, dv), expected, strict=True):
        torch.testing.assert_close(
            got, want.to(dtype), rtol=2e-7 if dtype == torch.float32 else 0.008, atol=1e-6
        )


@pytest.mark.parametrize("stride", [3, 5])
def test_a_table_of_gradients_whose_rows_are_no_pairs_apart(stride: int) -> None:
    dk = torch.zeros(2, 1, 8, 16)
    entries = torch.full((2, stride), 2**31 - 1, dtype=torch.int32)  # which lead nowhere
    entries[:, :2] = torch.tensor([[0, 1], [2, 3]])
    table = entries[:, :2].unflatten(1, (1, 2))
    gradients = _C.GradientPages(pool=pool_of(torch.ones(4, 1, 8, 16)), table=table)
    read = partial(
        _C.page_gradient_read, gradients=gradients, page_begin=0, page_end=1, page_size=8
    )
    with pytest.raises(ValueError, match=r"^gradients.table: expected rows .* pairs apart, got"):
        read(dk=dk, dv=dk.clone())
    assert not dk.any()


def reference_scores(
    q: torch.Tensor, summary: torch.Tensor, kind: str, heads: int, first_key: torch.Tensor | None,
    num_keys: torch.Tensor | None, num_past: int, page_size: int,
) -> torch.Tensor:  # fmt: skip
    batch, query_heads, chunk, _ = q.shape
    kv_heads, pages = summary.shape[2], -(-num_past // page_size)
    blocks = -(-chunk // page_size)
    result = torch.full((batch, blocks, kv_heads, pages), -torch.inf, dtype=torch.float64)
    grouped = q.double().unflatten(1, (kv_heads, query_heads // kv_heads))
    for b, block, head in itertools.product(range(batch), range(blocks), range(kv_heads)):
        real = num_past + chunk if num_keys is None else int(num_keys[b])
        first = 0 if first_key is None else int(first_key[b, block * page_size])
        end = min(chunk, (block + 1) * page_size, max(real - num_past, block * page_size))
        candidates = [
            p for p in range(pages)
            if (p + 1) * page_size > first and p * page_size < min(num_past, real)
        ]  # fmt: skip
        if not candidates:
            continue
        keys = summary[b, candidates, head].double()
        queries = grouped[b, head, :, block * page_size : end]
        if kind == "block_mean":
            mean = queries.mean((0, 1)) if queries.numel() else torch.zeros(q.shape[3]).double()
            scores = keys @ mean
        else:
            scores = (queries.sum(0) @ keys.T).softmax(-1).sum(0)
        result[b, block, head, candidates] = scores
    return result if heads > 1 else result.sum(2, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["block_mean", "token_softmax"])
@pytest.mark.parametrize("limits", [False, True])
def test_page_score(kind: str, heads: int, limits: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    num_past, chunk, page_size = 5 * 16 + 3, 40, 16
    q = torch.randn(3, chunk, 6, 24, generator=generator).to(dtype).transpose(1, 2)
    summary = torch.randn(3, 9, 2, 24, generator=generator).to(dtype)
    first_key = num_keys = None
    if limits:
        first_key = torch.zeros(3, chunk, dtype=torch.int32)
        first_key[0, 10:] = 33
        first_key[1, 16:] = 90
        num_keys = torch.tensor([num_past + chunk, num_past + 19, 50], dtype=torch.int32)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    scores = torch.full((3, 3, heads, 6), 5.0, dtype=real)
    _C.page_score(
        q=q, summary=summary, scores=scores, kind=kind, num_past=num_past, page_size=page_size,
        visibility=_C.Visibility(first_key=first_key, num_keys=num_keys),
    )  # fmt: skip
    expected = reference_scores(q, summary, kind, heads, first_key, num_keys, num_past, page_size)
    tolerance = 1e-13 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(scores.double(), expected, rtol=tolerance, atol=tolerance)


def test_page_select() -> None:
    inf = torch.inf
    scores = torch.tensor(
        [
            [0.1, 0.9, 0.9, 0.2, 0.9, 0.3],
            [-inf, -inf, 0.5, 0.1, 0.4, -inf],
            [-inf] * 6,
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ]
    ).view(1, 4, 1, 6)

    def select(**arguments: int) -> list[list[int]]:
        selection = torch.full((1, 4, 1, arguments["budget"]), 77, dtype=torch.int32)
        _C.page_select(scores=scores, selection=selection, **arguments)
        return selection[0, :, 0].tolist()

    assert select(budget=2) == [[1, 2], [2, 4], [-1, -1], [0, 1]]
    assert select(budget=4) == [[1, 2, 4, 5], [2, 3, 4, -1], [-1] * 4, [0, 1, 2, 3]]
    assert select(budget=3, sink_pages=1, recent_pages=1) == [
        [0, 1, 5], [2, 3, 4], [-1] * 3, [0, 1, 5],
    ]  # fmt: skip
    assert select(budget=8)[0] == [0, 1, 2, 3, 4, 5, -1, -1]
