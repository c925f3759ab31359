"""The engine's attention without the engine: a past in pages, and the gradient that reaches it.

python examples/paged_attention.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from oomb.ops import page_scores, page_select, page_write, paged_attention, pages_like

PAST, CHUNK, PAGE = 512, 128, 64
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32


def main() -> None:
    torch.manual_seed(0)
    past_k, past_v = torch.randn(2, 1, KV_HEADS, PAST, HEAD_DIM)
    q = torch.randn(1, HEADS, CHUNK, HEAD_DIM, requires_grad=True)
    k, v = torch.randn(2, 1, KV_HEADS, CHUNK, HEAD_DIM)

    # The past: pages in any order, found through a block table; each with its mean key.
    num_pages = PAST // PAGE
    kv_pages, dkv_pages = pages_like(past_k, num_pages, PAGE), pages_like(past_k, num_pages, PAGE)
    block_table = torch.randperm(num_pages, dtype=torch.int32)[None]
    summary = torch.zeros(1, num_pages, KV_HEADS, HEAD_DIM)
    page_write(past_k, past_v, kv_pages, block_table, summary=summary)

    o, _ = paged_attention(q, k, v, kv_pages, dkv_pages, block_table)
    o.sum().backward()  # adds the past's gradient to dkv_pages

    # The same with everything in one tensor.
    keys = torch.cat((past_k, k), dim=2).requires_grad_()
    values = torch.cat((past_v, v), dim=2)
    causal = torch.ones(CHUNK, PAST + CHUNK, dtype=torch.bool).tril(PAST)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal, enable_gqa=True)
    expected.sum().backward()
    d_past = dkv_pages[block_table[0].long(), 0].transpose(0, 1).reshape(KV_HEADS, PAST, HEAD_DIM)
    print(f"largest difference of the output: {(o - expected).abs().max():.1e}")
    print(f"... of the past keys' gradient:   {(d_past - keys.grad[0, :, :PAST]).abs().max():.1e}")

    # Each block of PAGE queries sees the three past pages with the highest scores.
    selection = page_select(page_scores(q, summary, PAST, PAGE), budget=3)
    sparse, _ = paged_attention(q, k, v, kv_pages, None, block_table, selection=selection)
    print(f"pages of the first block: {selection[0, 0, 0].tolist()} of {num_pages}")
    print(f"what the others carried:  {(sparse - o).norm() / o.norm():.2f} of the output's norm")


if __name__ == "__main__":
    main()
