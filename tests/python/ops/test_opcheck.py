"""The public operators as torch.library sees them: schema, fake kernels, autograd, compilation."""

from typing import Any

import pytest
import torch

from oomb.ops import page_write, pages_like

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
        self.rest: tuple[Any, ...] = (self.table, None, PAST, HEAD_DIM**-0.5, 0, selection)
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
