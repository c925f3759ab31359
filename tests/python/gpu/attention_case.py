"""A paged attention problem: inputs in page pools, float64 references, PyTorch's own error."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomb import _C

NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def bytes_on_gpu(size: int) -> Tensor:
    """What kernels take as a work space. Not zeros: they may not rely on anything."""
    return torch.full((size,), 255, device="cuda", dtype=torch.uint8)


def pool_of(slots: Tensor) -> _C.PagePool:
    return _C.PagePool(
        address=slots.data_ptr(),
        slot_bytes=slots.stride(0) * slots.element_size(),
        num_slots=len(slots),
    )


# What a row may not see, beside the future.
LIMITS: list[dict[str, Any]] = [
    dict(window=1),
    dict(window=100),
    dict(window=700),
    dict(documents=True),
    dict(padding=True),
    dict(documents=True, padding=True, window=250),
]


def soft_capped(scores: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    batch: int = 1
    kv_heads: int = 2
    group: int = 3
    chunk: int = 200
    head_dim: int = 128
    page_size: int = 128
    past: int = 0
    # "dense", "shared": one list for all heads, "per_head": one per kv head, "ladder": shared, and
    # page j is in every (2 ** j)th list
    lists: str = "dense"
    budget: int = 3
    window: int = 0
    documents: bool = False
    padding: bool = False
    packed: bool = False  # q, k, v of the chunk as slices of one [batch, tokens, heads, dim] tensor
    dtype: torch.dtype = torch.bfloat16
    dkv_dtype: torch.dtype = torch.float32
    deterministic: bool = True
    seed: int = 0
    softcap: float = 0.0

    @property
    def pages(self) -> int:
        return -(-self.past // self.page_size)

    @property
    def blocks(self) -> int:
        return -(-self.chunk // self.page_size)

    @property
    def real(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclasses.dataclass
class Result:
    """What attention and its gradient give; dk and dv of past and chunk together."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class Problem:
    """Random inputs. Pages lie in shuffled slots, spare slots and padding hold NaN."""

    def __init__(self, case: Case, slot_seed: int = 0, spare_slots: int = 3) -> None:
        self.case = c = case
        generator = torch.Generator("cuda").manual_seed(c.seed)

        def normal(heads: int, tokens: int) -> Tensor:
            shape = (c.batch, tokens, heads, c.head_dim)
            values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)
            return values.to(c.dtype).transpose(1, 2)

        heads = c.kv_heads * c.group
        self.q, self.d_o = normal(heads, c.chunk), normal(heads, c.chunk)
        self.k_all = normal(c.kv_heads, c.past + c.chunk)
        self.v_all = normal(c.kv_heads, c.past + c.chunk)
        self.d_lse = normal(heads, c.chunk)[..., 0].to(c.real).contiguous()
        self.scale = c.head_dim**-0.5
        self.first_key = self.num_keys = None
        if c.documents:
            rows = torch.arange(c.chunk, device="cuda")
            # Documents begin in the past, and in the chunk at a third and at two thirds.
            starts = torch.full((c.batch, c.chunk), c.past // 3, device="cuda", dtype=torch.int32)
            starts += torch.arange(c.batch, device="cuda", dtype=torch.int32)[:, None]
            starts[:, rows >= c.chunk // 3] = c.past + c.chunk // 3
            starts[:, rows >= 2 * c.chunk // 3] = c.past + 2 * c.chunk // 3
            self.first_key = starts
        if c.padding:
            lengths = [max(1, c.past + c.chunk - 37 * (b + 1)) for b in range(c.batch)]
            self.num_keys = torch.tensor(lengths, device="cuda", dtype=torch.int32)
            for b, length in enumerate(lengths):
                self.k_all[b, :, length:] = self.v_all[b, :, length:] = float("nan")
        self.k, self.v = self.k_all[:, :, c.past :], self.v_all[:, :, c.past :]
        if c.packed:
            together = torch.cat([self.q, self.k, self.v], dim=1).transpose(1, 2).contiguous()
            sizes = [heads, c.kv_heads, c.kv_heads]
            self.q, self.k, self.v = together.transpose(1, 2).split(sizes, dim=1)
        self._fill_pools(slot_seed, spare_slots)
        self._choose_pages(generator)

    def _fill_pools(self, slot_seed: int, spare_slots: int) -> None:
        c = self.case
        slots = c.batch * c.pages + spare_slots
        tile = (c.kv_heads, c.page_size, c.head_dim)
        self.pool = torch.full((slots, 2, *tile), float("nan"), device="cuda", dtype=c.dtype)
        self.dkv_pool = torch.zeros(2 * slots, *tile, device="cuda", dtype=c.dkv_dtype)
        shuffle = torch.Generator().manual_seed(slot_seed)
        shape = (c.batch, c.pages)
        order = torch.randperm(slots, generator=shuffle)[: c.batch * c.pages]
        self.block_table = order.to(torch.int32).view(shape).cuda()
        units = torch.randperm(2 * slots, generator=shuffle)[: 2 * c.batch * c.pages]
        self.dkv_table = units.to(torch.int32).view(*shape, 2).contiguous().cuda()
        for b, page in itertools.product(range(c.batch), range(c.pages)):
            begin, end = page * c.page_size, min((page + 1) * c.page_size, c.past)
            slot = self.pool[int(self.block_table[b, page])]
            slot[:] = 0
            slot[0, :, : end - begin] = self.k_all[b, :, begin:end]
            slot[1, :, : end - begin] = self.v_all[b, :, begin:end]

    def move_apart(self, num_bytes: int) -> None:
        """Spreads the pages over both ends of pools of that size."""
        kv, dkv = self.pool, self.dkv_pool
        old, table = self.block_table, self.block_table.clone()
        slots, units = num_bytes // kv[0].nbytes, num_bytes // dkv[0].nbytes
        self.pool = torch.empty(slots, *kv.shape[1:], device="cuda", dtype=kv.dtype)
        self.dkv_pool = torch.empty(units, *dkv.shape[1:], device="cuda", dtype=dkv.dtype)
        for b, page in itertools.product(range(self.case.batch), range(self.case.pages)):
            place = b * self.case.pages + page
            table[b, page] = slots - 1 - place if page % 2 == 0 else place
            self.pool[table[b, page]] = kv[old[b, page]]
            for kind in range(2):
                unit = 2 * place + kind
                self.dkv_table[b, page, kind] = units - 1 - unit if page % 2 else unit
        self.block_table = table

    def _choose_pages(self, generator: torch.Generator) -> None:
        c = self.case
        self.selection = None
        if c.lists == "dense":
            return
        shape = (c.batch, c.blocks, c.kv_heads if c.lists == "per_head" else 1)
        self.selection = torch.full((*shape, c.budget), -1, device="cuda", dtype=torch.int32)
        count = min(c.budget, c.pages)
        if c.lists == "ladder":
            for block in range(c.blocks):
                listed = [page for page in range(c.pages) if block % 2**page == 0][:count]
                self.selection[:, block, 0, : len(listed)] = torch.tensor(listed)
        elif count > 0:
            scores = torch.rand(*shape, c.pages, generator=generator, device="cuda")
            chosen = scores.topk(count, dim=-1).indices.sort(dim=-1).values
            self.selection[..., :count] = chosen.to(torch.int32)

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
            index = self.selection.long().masked_fill(self.selection < 0, c.pages)
            listed = listed.scatter(-1, index, 1.0).bool()[..., : c.pages]
            by_row = listed.repeat_interleave(c.page_size, dim=1)[:, : c.chunk]
            by_key = by_row.repeat_interleave(c.page_size, dim=3)[..., : c.past]
            seen[..., : c.past] &= by_key.transpose(1, 2)
        return seen.repeat_interleave(c.group, dim=1)

    def dense(self, dtype: torch.dtype) -> Result:
        """The same by plain torch in `dtype`, gradients by autograd."""
        c = self.case
        leaves = [self.q, self.k_all, self.v_all]
        q, k, v = (t.nan_to_num(0.0).to(dtype).contiguous().requires_grad_() for t in leaves)
        seen = self.visible()
        scores = (q @ k.repeat_interleave(c.group, dim=1).transpose(-1, -2)) * self.scale
        scores = soft_capped(scores, c.softcap).masked_fill(~seen, float("-inf"))
        empty = ~seen.any(dim=-1, keepdim=True)
        lse = torch.logsumexp(scores.masked_fill(empty, 0.0), dim=-1)
        p = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
        o = p @ v.repeat_interleave(c.group, dim=1)
        d_lse = self.d_lse.to(dtype).masked_fill(empty[..., 0], 0.0)
        grads = torch.autograd.grad([o, lse], [q, k, v], [self.d_o.to(dtype), d_lse.to(lse.dtype)])
        return Result(o.detach(), lse.detach().masked_fill(empty[..., 0], float("-inf")), *grads)

    def reference(self) -> tuple[Tensor, Tensor]:
        """o and lse in float64, without the gradients that dense() needs room for."""
        k, v = self._for_each_head(torch.float64)
        scores = (self.q.double() @ k.transpose(-1, -2)) * self.scale
        scores = soft_capped(scores, self.case.softcap)
        scores.masked_fill_(~self.visible(), float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        scores -= lse.masked_fill(lse == float("-inf"), 0.0)[..., None]
        return scores.exp_() @ v, lse

    def sdpa(self) -> Tensor:
        """o by PyTorch's own fused attention: the yardstick for the forward's errors."""
        k, v = self._for_each_head(self.case.dtype)
        seen = self.visible()
        empty = ~seen.any(dim=-1, keepdim=True)
        o = torch.nn.functional.scaled_dot_product_attention(
            self.q.contiguous(), k, v, attn_mask=seen | empty, scale=self.scale
        )
        return o.masked_fill(empty, 0.0)

    def _for_each_head(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = (x.nan_to_num(0.0).to(dtype) for x in (self.k_all, self.v_all))
        group = self.case.group
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that forward and backward share in all waves."""
        c = self.case
        visibility = _C.Visibility(
            window=c.window, first_key=self.first_key, num_keys=self.num_keys
        )
        return dict(
            chunk=_C.Chunk(
                q=self.q,
                k=self.k,
                v=self.v,
                scale=self.scale,
                cap=c.softcap,
                visibility=visibility,
            ),
            past=_C.PastPages(
                page_size=c.page_size,
                pool=pool_of(self.pool),
                block_table=self.block_table,
                num_tokens=c.past,
                selection=self.selection,
            ),
            stream=torch.cuda.current_stream().cuda_stream,
        )

    def _waves(self, borders: tuple[int, ...]) -> list[_C.Wave]:
        spans = list(itertools.pairwise([0, *borders, self.case.pages]))
        return [
            _C.Wave(begin=begin, end=end, first=i == 0, last=i == len(spans) - 1)
            for i, (begin, end) in enumerate(spans)
        ]

    def forward(
        self,
        borders: tuple[int, ...] = (),
        workspace: Callable[[int], Tensor] | None = bytes_on_gpu,
    ) -> tuple[Tensor, Tensor]:
        c = self.case
        o = torch.full_like(self.q, float("nan"))
        rows = self.q.shape[:3]
        lse = torch.full(rows, float("nan"), device="cuda", dtype=c.real)
        state = _C.SoftmaxState(
            acc=torch.full(self.q.shape, float("nan"), device="cuda", dtype=c.real),
            max=torch.full(rows, float("nan"), device="cuda", dtype=c.real),
            sum=torch.full(rows, float("nan"), device="cuda", dtype=c.real),
        )
        output = _C.Output(o=o, lse=lse)
        for wave in self._waves(borders):
            _C.attention_forward(
                **self.arguments(), output=output, wave=wave, state=state, workspace=workspace
            )
        return o, lse

    def backward(
        self, o: Tensor, lse: Tensor, borders: tuple[int, ...] = (), rounding_seed: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq and the chunk's dk, dv; the pages' are added to dkv_pool."""
        c = self.case
        dq = torch.full_like(self.q, float("nan"))
        dk, dv = torch.full_like(self.k, float("nan")), torch.full_like(self.v, float("nan"))
        dq_acc = torch.full(self.q.shape, float("nan"), device="cuda", dtype=c.real)
        delta = torch.full(self.q.shape[:3], float("nan"), device="cuda", dtype=c.real)
        gradients = None
        if c.pages:
            gradients = _C.GradientPages(
                pool=pool_of(self.dkv_pool),
                table=self.dkv_table,
                dtype=NAMES[c.dkv_dtype],
                rounding_seed=rounding_seed,
            )
        for wave in self._waves(borders):
            _C.attention_backward(
                **self.arguments(),
                output=_C.Output(o=o, lse=lse),
                d_output=_C.Output(o=self.d_o, lse=self.d_lse),
                d_chunk=_C.ChunkGradients(dq=dq, dk=dk, dv=dv),
                state=_C.BackwardState(delta=delta, dq_acc=dq_acc),
                gradients=gradients,
                wave=wave,
                deterministic=c.deterministic,
                workspace=bytes_on_gpu,
            )
        return dq, dk, dv

    def page_gradients(self) -> tuple[Tensor, Tensor]:
        """dK and dV of the past, gathered from the gradient pages."""
        c = self.case
        pages = self.dkv_pool[self.dkv_table.long()]  # [B, pages, 2, Hkv, P, D]
        pages = (
            pages.movedim(2, 0)
            .transpose(2, 3)
            .reshape(2, c.batch, c.kv_heads, c.pages * c.page_size, c.head_dim)
        )
        return pages[0, :, :, : c.past], pages[1, :, :, : c.past]

    def run(self, borders: tuple[int, ...] = ()) -> Result:
        """Ours. Gradient pages start at zero."""
        self.dkv_pool.zero_()
        o, lse = self.forward(borders)
        dq, dk, dv = self.backward(o, lse, borders)
        past_dk, past_dv = self.page_gradients()
        return Result(
            o,
            lse,
            dq,
            torch.cat([past_dk.to(self.case.real), dk.to(self.case.real)], dim=2),
            torch.cat([past_dv.to(self.case.real), dv.to(self.case.real)], dim=2),
        )


def check(case: Case) -> None:
    """Against float64: for 16-bit types at most twice PyTorch's own error, else absolutely."""
    problem = Problem(case)
    ours = problem.run().tensors()
    expected = problem.dense(torch.float64).tensors()
    theirs = problem.dense(case.dtype).tensors()
    for name, value in expected.items():
        if name == "lse":
            empty = value == float("-inf")
            assert torch.equal(ours["lse"] == float("-inf"), empty)
            assert (ours["o"][empty] == 0).all() and (ours["dq"][empty] == 0).all()
            error = (ours["lse"].double() - value)[~empty].abs().max().item()
            assert error <= (1e-12 if case.dtype == torch.float64 else 1e-3), f"lse: {error}"
            continue
        assert not ours[name].isnan().any(), f"{name} has NaN"
        error = (ours[name].double() - value).abs().max().item()
        largest = value.abs().max().item()
        if case.dtype == torch.float64:
            assert error <= 1e-11 * max(largest, 1.0), f"{name}: {error}"
        elif case.dtype == torch.float32:
            assert error <= 1e-5 * max(largest, 1.0), f"{name}: {error}"
        else:
            own = (theirs[name].double() - value).abs().max().item()
            assert error <= 2 * own + 1e-6, f"{name}: error {error}, PyTorch's {own}"
            x, y = ours[name].double().flatten(), value.flatten()
            assert x @ y >= (1 - 1e-5) * x.norm() * y.norm(), (
                f"{name}: {x @ y / x.norm() / y.norm()}"
            )


def check_bits(case: Case, borders: tuple[int, ...]) -> None:
    """Neither waves, nor slots, nor a second run change a bit."""
    problem = Problem(case)
    once = problem.run().tensors()
    for other in (problem.run(borders), problem.run(), Problem(case, slot_seed=7).run()):
        for name, value in other.tensors().items():
            assert torch.equal(value, once[name]), name
