"""A problem for the attention kernels: inputs in a page pool, the reference in float64, a run."""

import dataclasses

import torch
from torch import Tensor

from oomb import _C


@dataclasses.dataclass(frozen=True)
class Case:
    head_dim: int = 128
    page_size: int = 128
    group: int = 7
    chunk: int = 256
    past: int = 0
    batch: int = 1
    kv_heads: int = 2
    lists: str = "dense"  # "dense", "shared": one list for all heads, "per_head": one per kv head
    budget: int = 3
    window: int = 0
    documents: bool = False
    padding: bool = False
    packed: bool = False  # q, k, v as slices of one [batch, tokens, heads, dim] tensor
    seed: int = 0

    @property
    def pages(self) -> int:
        return -(-self.past // self.page_size)


class Problem:
    """Random inputs of a case. Pages lie in slots in a random order; spare slots hold NaN."""

    def __init__(self, case: Case, slot_seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.case = case
        c = case
        heads = c.kv_heads * c.group
        generator = torch.Generator("cuda").manual_seed(c.seed)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)
            return values.to(dtype)

        if c.packed:
            qkv = normal(c.batch, c.chunk, heads + 2 * c.kv_heads, c.head_dim).transpose(1, 2)
            self.q, self.k, self.v = qkv.split([heads, c.kv_heads, c.kv_heads], dim=1)
        else:
            self.q = normal(c.batch, heads, c.chunk, c.head_dim)
            self.k = normal(c.batch, c.kv_heads, c.chunk, c.head_dim)
            self.v = normal(c.batch, c.kv_heads, c.chunk, c.head_dim)
        self.scale = c.head_dim**-0.5

        self.past_k = normal(c.batch, c.kv_heads, c.past, c.head_dim)
        self.past_v = normal(c.batch, c.kv_heads, c.past, c.head_dim)
        self._fill_pool(slot_seed, dtype)
        self._choose_pages(generator)

        rows = torch.arange(c.chunk, device="cuda", dtype=torch.int32)
        self.first_key = self.num_keys = None
        total = c.past + c.chunk
        if c.documents:
            # Documents begin in the past, and in the chunk at a third and at two thirds.
            starts = torch.zeros(c.batch, c.chunk, device="cuda", dtype=torch.int32)
            for b in range(c.batch):
                starts[b] = c.past // 3 + b
                starts[b, rows >= c.chunk // 3] = c.past + c.chunk // 3
                starts[b, rows >= 2 * c.chunk // 3] = c.past + 2 * c.chunk // 3
            self.first_key = starts
        if c.padding:
            lengths = [max(1, total - 37 * (b + 1)) for b in range(c.batch)]
            self.num_keys = torch.tensor(lengths, device="cuda", dtype=torch.int32)

    def _fill_pool(self, slot_seed: int, dtype: torch.dtype) -> None:
        c = self.case
        slots = c.batch * c.pages + 3
        shape = (slots, 2, c.kv_heads, c.page_size, c.head_dim)
        self.pool = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(slot_seed))
        self.block_table = torch.full((c.batch, max(c.pages, 1)), -1, dtype=torch.int32)
        for b in range(c.batch):
            for page in range(c.pages):
                slot = int(order[b * c.pages + page])
                self.block_table[b, page] = slot
                begin, end = page * c.page_size, min((page + 1) * c.page_size, c.past)
                self.pool[slot] = 0
                self.pool[slot, 0, :, : end - begin] = self.past_k[b, :, begin:end]
                self.pool[slot, 1, :, : end - begin] = self.past_v[b, :, begin:end]
        self.block_table = self.block_table.cuda()

    def _choose_pages(self, generator: torch.Generator) -> None:
        c = self.case
        self.selection = None
        if c.lists == "dense":
            return
        heads = 1 if c.lists == "shared" else c.kv_heads
        blocks = -(-c.chunk // c.page_size)
        shape = (c.batch, blocks, heads)
        count = min(c.budget, c.pages)
        selection = torch.full((*shape, c.budget), -1, device="cuda", dtype=torch.int32)
        if count > 0:
            scores = torch.rand(*shape, c.pages, generator=generator, device="cuda")
            chosen = scores.topk(count, dim=-1).indices.sort(dim=-1).values
            selection[..., :count] = chosen.to(torch.int32)
        self.selection = selection

    def visible(self) -> Tensor:
        """[batch, query heads, chunk, past + chunk]: may the row see the key."""
        c = self.case
        rows = torch.arange(c.chunk, device="cuda")[:, None]
        keys = torch.arange(c.past + c.chunk, device="cuda")[None, :]
        seen = keys <= c.past + rows
        if c.window > 0:
            seen = seen & (keys > c.past + rows - c.window)
        seen = seen[None, None].expand(c.batch, c.kv_heads, -1, -1).clone()
        if self.first_key is not None:
            seen &= (keys >= self.first_key[:, :, None])[:, None]
        if self.num_keys is not None:
            seen &= (keys < self.num_keys[:, None, None])[:, None]
        if self.selection is not None and c.past > 0:
            listed = torch.zeros(*self.selection.shape[:3], c.pages + 1, device="cuda")
            index = self.selection.long().clone()
            index[index < 0] = c.pages
            listed = listed.scatter(-1, index, 1.0).bool()[..., : c.pages]
            by_row = listed.repeat_interleave(c.page_size, dim=1)[:, : c.chunk]
            by_key = by_row.repeat_interleave(c.page_size, dim=3)[..., : c.past]
            seen[..., : c.past] &= by_key.transpose(1, 2)
        return seen.repeat_interleave(c.group, dim=1)

    def all_keys(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of past and chunk, one per query head."""
        k = torch.cat([self.past_k, self.k], dim=2).to(dtype)
        v = torch.cat([self.past_v, self.v], dim=2).to(dtype)
        group = self.case.group
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def reference(self) -> tuple[Tensor, Tensor]:
        """o and lse in float64."""
        k, v = self.all_keys(torch.float64)
        scores = (self.q.double() @ k.transpose(-1, -2)) * self.scale
        scores.masked_fill_(~self.visible(), float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        empty = lse == float("-inf")
        scores -= lse.masked_fill(empty, 0.0)[..., None]
        return scores.exp_() @ v, lse

    def torch_bf16(self) -> Tensor:
        """The same by PyTorch's own bf16 attention: the yardstick for errors."""
        k, v = self.all_keys(torch.bfloat16)
        seen = self.visible()
        empty = ~seen.any(dim=-1, keepdim=True)
        o = torch.nn.functional.scaled_dot_product_attention(
            self.q.contiguous(), k, v, attn_mask=seen | empty, scale=self.scale
        )
        return o.masked_fill(empty, 0.0)

    def arguments(self) -> dict[str, object]:
        """Keyword arguments that all waves share."""
        c = self.case
        return dict(
            q=self.q,
            k=self.k,
            v=self.v,
            scale=self.scale,
            page_size=c.page_size,
            window=c.window,
            first_key=self.first_key,
            num_keys=self.num_keys,
            kv_pool=self.pool.data_ptr(),
            kv_slot_bytes=self.pool[0].numel() * self.pool.element_size(),
            kv_num_slots=self.pool.shape[0],
            block_table=self.block_table,
            num_past=c.past,
            selection=self.selection,
            stream=torch.cuda.current_stream().cuda_stream,
        )

    def forward(self, borders: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """o and lse by our kernels; past pages in waves that end at `borders`."""
        q = self.q
        o = torch.full(q.shape, float("nan"), device="cuda", dtype=q.dtype)
        lse = torch.full(q.shape[:3], float("nan"), device="cuda")
        state = {}
        if borders:
            state = dict(
                acc=torch.full(q.shape, float("nan"), device="cuda", dtype=torch.float32),
                max=torch.full(q.shape[:3], float("nan"), device="cuda"),
                sum=torch.full(q.shape[:3], float("nan"), device="cuda"),
            )
        ends = [*borders, self.case.pages]
        begins = [0, *borders]
        for wave, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            _C.attention_forward(
                **self.arguments(),
                **state,
                o=o,
                lse=lse,
                page_begin=begin,
                page_end=end,
                own_chunk=wave == 0,
                first_wave=wave == 0,
                last_wave=wave == len(ends) - 1,
            )
        torch.cuda.synchronize()
        return o, lse
