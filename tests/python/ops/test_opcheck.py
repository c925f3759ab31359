"""The public operators as torch.library sees them: schema, fake kernels, autograd, compilation."""

from typing import Any

import pytest
import torch

from oomb.ops import page_scores, page_select, page_write, paged_attention, pages_like

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KV_HEADS, CHUNK, HEAD_DIM, PAGE, PAST = 6, 2, 150, 64, 64, 3 * 64 + 17


class Inputs:
    """Arguments of paged_attention: a past of four pages in shuffled slots, the last partial."""

    def __init__(self, device: str, listed: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, tokens: int) -> torch.Tensor:
            values = torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)
            return values.to(device, torch.bfloat16)

        self.past_k, self.past_v = normal(KV_HEADS, PAST), normal(KV_HEADS, PAST)
        self.q, self.d_o = normal(HEADS, CHUNK), normal(HEADS, CHUNK)
        self.k, self.v = normal(KV_HEADS, CHUNK), normal(KV_HEADS, CHUNK)
        self.pages = pages_like(self.k, 6, PAGE)
        self.gradients = pages_like(self.k, 6, PAGE, dtype=torch.float32)
        self.table = torch.tensor([[4, 0, 5, 1]], dtype=torch.int32, device=device)
        page_write(self.past_k, self.past_v, self.pages, self.table)
        selection = None
        if listed:
            lists = torch.tensor([[0, 2], [1, -1], [2, 3]], dtype=torch.int32, device=device)
            selection = lists[None, :, None].contiguous()
        self.rest: tuple[Any, ...] = (self.table, None, PAST, HEAD_DIM**-0.5, 2.0, 0, selection)
        self.rest += (None, None, True)


@pytest.mark.parametrize("listed", [False, True], ids=["dense", "listed"])
@pytest.mark.parametrize("device", DEVICES)
def test_paged_attention(device: str, listed: bool) -> None:
    i = Inputs(device, listed)
    leaves = [x.requires_grad_() for x in (i.q, i.k, i.v)]
    arguments = (*leaves, i.pages, None, *i.rest)
    torch.library.opcheck(torch.ops.oomb.paged_attention.default, arguments)


@pytest.mark.parametrize("listed", [False, True], ids=["dense", "listed"])
@pytest.mark.parametrize("device", DEVICES)
def test_paged_attention_backward(device: str, listed: bool) -> None:
    i = Inputs(device, listed)
    o, lse = torch.ops.oomb.paged_attention(i.q, i.k, i.v, i.pages, i.gradients, *i.rest)
    d_lse = torch.randn_like(lse)
    arguments = (i.q, i.k, i.v, o, lse, i.d_o, d_lse, i.pages, i.gradients, *i.rest)
    torch.library.opcheck(torch.ops.oomb.paged_attention_backward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_page_write(device: str) -> None:
    i = Inputs(device, listed=False)
    summary = torch.zeros(1, 4, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    num_rows = torch.tensor([PAST - 5], dtype=torch.int32, device=device)
    arguments = (i.past_k, i.past_v, i.pages, i.table, num_rows, summary)
    torch.library.opcheck(torch.ops.oomb.page_write.default, arguments)


@pytest.mark.parametrize("share", ["all_heads", "kv_head"])
@pytest.mark.parametrize("score", ["block_mean", "token_softmax"])
@pytest.mark.parametrize("device", DEVICES)
def test_page_scores(device: str, score: str, share: str) -> None:
    i = Inputs(device, listed=False)
    summary = torch.randn(1, 4, KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    num_keys = torch.tensor([PAST + CHUNK - 9], dtype=torch.int32, device=device)
    arguments = (i.q, summary, PAST, PAGE, score, share, None, num_keys)
    torch.library.opcheck(torch.ops.oomb.page_scores.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_page_select(device: str) -> None:
    scores = torch.randn(2, 3, KV_HEADS, 20, device=device)
    torch.library.opcheck(torch.ops.oomb.page_select.default, (scores, 4, 1, 2))


def _choose_and_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: list[torch.Tensor], table: torch.Tensor
) -> torch.Tensor:
    """All operators of oomb.ops in one program."""
    pages = pages_like(k, 6, PAGE)
    summary = k.new_zeros(1, 4, KV_HEADS, HEAD_DIM)
    page_write(*past, pages, table, summary=summary, check=False)
    scores = page_scores(q, summary, PAST, PAGE, share="kv_head")
    selection = page_select(scores, 2, sink_pages=1)
    o, _ = paged_attention(
        q, k, v, pages, None, table, num_past=PAST, selection=selection, check=False
    )
    return o


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_of_all_of_them(device: str, dynamic: bool) -> None:
    i = Inputs(device, listed=False)
    past = [i.past_k, i.past_v]
    eager = _choose_and_attend(i.q, i.k, i.v, past, i.table)
    compiled = torch.compile(
        _choose_and_attend, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    assert torch.equal(compiled(i.q, i.k, i.v, past, i.table), eager)
