"""Writing, reading, scoring and choosing pages on the device, against plain torch in float64."""

import pytest
import torch
from attention_case import pool_of
from torch import Tensor

from oomb import _C

pytestmark = pytest.mark.gpu

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = {FP64: "float64", FP32: "float32", FP16: "float16", BF16: "bfloat16"}
EPSILON = {FP64: 2e-16, FP32: 1.2e-7, FP16: 1e-3, BF16: 8e-3}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=FP64).to(dtype)


def workspace(size: int) -> Tensor:
    return torch.full((size,), 255, device="cuda", dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "page_size"), [(128, 128), (64, 64), (96, 100), (5, 7), (256, 1), (250, 300)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_page_write(head_dim: int, page_size: int, dtype: torch.dtype, padded: bool) -> None:
    batch, heads = 2, 3
    chunk = 3 * page_size + page_size // 2
    pages = -(-chunk // page_size)
    # Strided like a projection's output.
    k = normal(batch, chunk, heads, head_dim, dtype=dtype).transpose(1, 2)
    v = normal(batch, chunk, heads, head_dim, dtype=dtype, seed=1).transpose(1, 2)
    tile = (2, heads, page_size, head_dim)
    pool = torch.full((batch * pages + 2, *tile), float("nan"), device="cuda", dtype=dtype)
    slots = torch.randperm(batch * pages + 2)[: batch * pages].view(batch, pages)
    slots = slots.to(torch.int32).cuda()
    skipped = int(slots[1, 0])
    slots[1, 0] = -1
    lengths = [chunk - page_size, chunk - 1] if padded else [chunk, chunk]
    num_rows = torch.tensor(lengths, dtype=torch.int32, device="cuda") if padded else None
    summary = torch.full((batch, pages, heads, head_dim), float("nan"), device="cuda", dtype=dtype)
    _C.page_write(
        k=k,
        v=v,
        pool=pool_of(pool),
        slots=slots,
        page_begin=0,
        page_end=pages,
        page_size=page_size,
        num_rows=num_rows,
        summary=summary,
    )
    for b in range(batch):
        for page in range(pages):
            if (b, page) == (1, 0):
                assert pool[skipped].isnan().all()
                continue
            begin = page * page_size
            rows = min(max(lengths[b] - begin, 0), page_size)
            slot = pool[int(slots[b, page])]
            assert torch.equal(slot[0, :, :rows], k[b, :, begin : begin + rows])
            assert torch.equal(slot[1, :, :rows], v[b, :, begin : begin + rows])
            assert (slot[:, :, rows:] == 0).all()
            mean = torch.zeros(heads, head_dim, device="cuda", dtype=FP64)
            if rows > 0:
                mean = k[b, :, begin : begin + rows].double().mean(dim=1)
            error = (summary[b, page].double() - mean).abs().max().item()
            assert error <= EPSILON[dtype] * 4, (b, page, error)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("dkv_dtype", [FP32, BF16], ids=str)
def test_page_gradient_read(dtype: torch.dtype, dkv_dtype: torch.dtype) -> None:
    batch, heads, chunk, head_dim, page_size = 2, 2, 300, 96, 128
    dk = normal(batch, heads, chunk, head_dim, dtype=dtype)
    dv = normal(batch, heads, chunk, head_dim, dtype=dtype, seed=1)
    pool = normal(12, heads, page_size, head_dim, dtype=dkv_dtype, seed=2)
    table = torch.tensor([[[0, 3], [4, 5], [9, 8]], [[11, 1], [-1, -1], [2, 7]]])
    table = table.to(torch.int32).cuda()
    expected = torch.stack([dk, dv]).double()
    for b in range(batch):
        for page in range(3):
            for kind in range(2):
                unit = int(table[b, page, kind])
                if unit < 0:
                    continue
                begin, end = page * page_size, min((page + 1) * page_size, chunk)
                expected[kind, b, :, begin:end] += 0.5 * pool[unit, :, : end - begin].double()
    _C.page_gradient_read(
        dk=dk,
        dv=dv,
        gradients=_C.GradientPages(pool=pool_of(pool), table=table, dtype=NAMES[dkv_dtype]),
        page_begin=0,
        page_end=3,
        page_size=page_size,
        scale=0.5,
    )
    assert (torch.stack([dk, dv]).double() - expected).abs().max() <= EPSILON[dtype] * 4


def reference_scores(
    q: Tensor,
    summary: Tensor,
    kind: str,
    past: int,
    page_size: int,
    heads: int,
    first_key: Tensor | None,
    num_keys: Tensor | None,
    round_to: torch.dtype,
) -> Tensor:
    batch, query_heads, chunk, _ = q.shape
    kv_heads, pages = summary.shape[2], -(-past // page_size)
    blocks = -(-chunk // page_size)
    grouped = q.double().view(batch, kv_heads, query_heads // kv_heads, chunk, -1)
    keys = summary.double()[:, :pages].movedim(2, 1)
    scores = torch.full((batch, blocks, heads, pages), float("-inf"), device="cuda", dtype=FP64)
    for b in range(batch):
        limit = past if num_keys is None else min(past, int(num_keys[b]))
        real = chunk if num_keys is None else max(0, min(chunk, int(num_keys[b]) - past))
        for block in range(blocks):
            begin = block * page_size
            end = min(begin + page_size, chunk)
            first = 0 if first_key is None else int(first_key[b, begin])
            index = torch.arange(pages, device="cuda")
            candidates = ((index + 1) * page_size > first) & (index * page_size < limit)
            rows = grouped[b, :, :, begin : max(begin, min(end, real))]
            if kind == "block_mean":
                mean = rows.mean(dim=(1, 2)) if rows.shape[2] > 0 else rows.sum(dim=(1, 2))
                value = (keys[b] @ mean[..., None])[..., 0]
            else:
                logits = rows.sum(dim=1).to(round_to).double() @ keys[b].transpose(-1, -2)
                logits = logits.masked_fill(~candidates, float("-inf"))
                value = torch.softmax(logits, dim=-1).nan_to_num(0.0).sum(dim=1)
            value = value.sum(dim=0, keepdim=True) if heads == 1 else value
            scores[b, block, :, candidates] = value[:, candidates]
    return scores


@pytest.mark.parametrize("kind", ["block_mean", "token_softmax"])
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "page_size"),
    [
        *((128, 128), (128, 64), (64, 64), (64, 128), (256, 64), (256, 128)),
        *((96, 128), (33, 20), (256, 8), (300, 16), (512, 64), (1024, 64)),
    ],
)
@pytest.mark.parametrize("limits", ["none", "documents", "padding"])
@pytest.mark.parametrize("shared", [True, False])
def test_page_score(
    head_dim: int, page_size: int, dtype: torch.dtype, kind: str, limits: str, shared: bool
) -> None:
    batch, kv_heads, group, chunk = 2, 2, 3, 2 * page_size + 9
    past = 700 * page_size - page_size // 2
    pages = 700
    q = normal(batch, chunk, kv_heads * group, head_dim, dtype=dtype).transpose(1, 2)
    summary = normal(batch, pages + 1, kv_heads, head_dim, dtype=dtype, seed=1) * 0.2
    first_key = num_keys = None
    if limits == "documents":
        first_key = torch.zeros(batch, chunk, dtype=torch.int32, device="cuda")
        first_key[:, : page_size + 5] = 3 * page_size + 1
        first_key[:, page_size + 5 :] = past + page_size + 5
    if limits == "padding":
        lengths = [past + page_size + 3, 5 * page_size + 1]
        num_keys = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        for b, length in enumerate(lengths):
            q[b, :, max(0, length - past) :] = float("nan")
    heads = 1 if shared else kv_heads
    real = FP64 if dtype == FP64 else FP32
    shape = (batch, -(-chunk // page_size), heads, pages)
    scores = torch.full(shape, float("nan"), device="cuda", dtype=real)
    _C.page_score(
        q=q,
        summary=summary,
        scores=scores,
        kind=kind,
        num_past=past,
        page_size=page_size,
        visibility=_C.Visibility(first_key=first_key, num_keys=num_keys),
        workspace=workspace,
    )
    # With tensor cores the group's sum is rounded to the inputs' type.
    matrix = dtype in (FP16, BF16) and head_dim in (64, 128, 256) and page_size in (64, 128)
    expected = reference_scores(
        q, summary, kind, past, page_size, heads, first_key, num_keys, dtype if matrix else FP64
    )
    none = expected == float("-inf")
    assert torch.equal(scores == float("-inf"), none)
    ours, theirs = scores.double()[~none], expected[~none]
    scale = theirs.abs().max().item()
    tolerance = 1e-12 if dtype == FP64 else 5e-3 if matrix else 2e-5
    assert (ours - theirs).abs().max().item() <= tolerance * scale


def reference_selection(scores: Tensor, budget: int, sinks: int, recents: int) -> Tensor:
    rows = scores.reshape(-1, scores.shape[-1]).tolist()
    result = []
    for row in rows:
        candidates = [i for i, score in enumerate(row) if score > float("-inf")]
        forced = set(candidates[:sinks]) | set(candidates[max(0, len(candidates) - recents) :])
        order = sorted(
            candidates, key=lambda i: (i not in forced, -row[i] if i not in forced else 0, i)
        )
        chosen = sorted(order[:budget])
        result.append(chosen + [-1] * (budget - len(chosen)))
    return torch.tensor(result, dtype=torch.int32).view(*scores.shape[:-1], budget)


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize(
    ("pages", "budget"), [(1, 1), (5, 8), (100, 3), (1000, 64), (4099, 256), (65536, 300)]
)
@pytest.mark.parametrize(("sinks", "recents"), [(0, 0), (1, 0), (2, 3)])
def test_page_select(pages: int, budget: int, dtype: torch.dtype, sinks: int, recents: int) -> None:
    scores = normal(2, 3, 2, pages, dtype=dtype)
    scores[0, 1] = (scores[0, 1] * 2).round() / 2  # many ties, some of them zeros of both signs
    scores[1, 0] = 0.25
    scores[1, 1, :, pages // 2 :] = float("-inf")
    scores[1, 2] = float("-inf")
    selection = torch.full((2, 3, 2, budget), 12345, device="cuda", dtype=torch.int32)
    _C.page_select(
        scores=scores, selection=selection, budget=budget, sink_pages=sinks, recent_pages=recents
    )
    expected = reference_selection(scores.cpu(), budget, sinks, recents)
    assert torch.equal(selection.cpu(), expected)
