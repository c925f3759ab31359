"""A paged attention problem and its dense reference: pool, tables and waves beside plain masks."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from oomb import _C

POISON = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    batch: int = 1
    query_heads: int = 4
    kv_heads: int = 2
    chunk: int = 40
    head_dim: int = 16
    page_size: int = 16
    num_past: int = 48
    window: int = 0
    documents: tuple[tuple[int, ...], ...] = ()  # per sequence: first token of each document
    num_keys: tuple[int, ...] = ()  # real tokens per sequence
    budget: int = 0  # pages per query block; 0: all
    selection_heads: int = 1
    dtype: torch.dtype = torch.float64
    dkv_dtype: torch.dtype = torch.float64
    no_gradient_pages: tuple[int, ...] = ()
    softcap: float = 0.0
    seed: int = 0

    @property
    def pages(self) -> int:
        return -(-self.num_past // self.page_size)

    @property
    def blocks(self) -> int:
        return -(-self.chunk // self.page_size)

    @property
    def real(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Problem:
    """Random inputs of a case, its pool in shuffled slots, and both ways to run it."""

    def __init__(self, case: Case, slot_seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        tokens = case.num_past + case.chunk

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

        # Strided like the output of a projection: [B, C, H, D] seen as [B, H, C, D].
        self.q = random(case.batch, case.chunk, case.query_heads, case.head_dim).transpose(1, 2)
        self.k_all = random(case.batch, tokens, case.kv_heads, case.head_dim).transpose(1, 2)
        self.v_all = random(case.batch, tokens, case.kv_heads, case.head_dim).transpose(1, 2)
        self.d_o = random(case.batch, case.chunk, case.query_heads, case.head_dim).transpose(1, 2)
        self.d_lse = random(case.batch, case.query_heads, case.chunk).to(case.real)
        self.scale = 1.3 / math.sqrt(case.head_dim)
        self.first_key = self._first_key()
        self.num_keys = torch.tensor(case.num_keys, dtype=torch.int32) if case.num_keys else None
        for b, count in enumerate(case.num_keys):
            self.k_all[b, :, count:] = POISON
            self.v_all[b, :, count:] = POISON
        self.k = self.k_all[:, :, case.num_past :]
        self.v = self.v_all[:, :, case.num_past :]
        self.selection = self._selection(generator)
        self._fill_pool(slot_seed)

    def _first_key(self) -> torch.Tensor | None:
        case = self.case
        if not case.documents:
            return None
        rows = []
        for starts in case.documents:
            positions = range(case.num_past, case.num_past + case.chunk)
            rows.append([max(s for s in starts if s <= p) for p in positions])
        return torch.tensor(rows, dtype=torch.int32)

    def _selection(self, generator: torch.Generator) -> torch.Tensor | None:
        case = self.case
        if case.budget == 0:
            return None
        lists = torch.full(
            (case.batch, case.blocks, case.selection_heads, case.budget), -1, dtype=torch.int32
        )
        count = min(case.budget, case.pages)
        for row in lists.view(-1, case.budget):
            chosen = torch.randperm(case.pages, generator=generator)[:count]
            row[:count] = chosen.sort().values.to(torch.int32)
        return lists

    def _fill_pool(self, slot_seed: int) -> None:
        case = self.case
        kv_shape = (2, case.kv_heads, case.page_size, case.head_dim)
        slots = case.batch * case.pages + 3
        self.kv_pool = torch.full((slots, *kv_shape), POISON, dtype=case.dtype)
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(slot_seed))
        self.block_table = order[: case.batch * case.pages].to(torch.int32)
        self.block_table = self.block_table.view(case.batch, case.pages).contiguous()
        # Gradient pages: dK and dV of a page in two places of their own, in shuffled order.
        units = 2 * slots
        self.dkv_pool = torch.full((units, *kv_shape[1:]), POISON, dtype=case.dkv_dtype)
        order = torch.randperm(units, generator=torch.Generator().manual_seed(slot_seed + 1))
        self.dkv_table = order[: 2 * case.batch * case.pages].to(torch.int32)
        self.dkv_table = self.dkv_table.view(case.batch, case.pages, 2).contiguous()
        for page in case.no_gradient_pages:
            self.dkv_table[:, page] = -1
        for b in range(case.batch):
            for page in range(case.pages):
                begin = page * case.page_size
                end = min(begin + case.page_size, case.num_past)
                slot = self.kv_pool[self.block_table[b, page]]
                slot[0, :, : end - begin] = self.k_all[b, :, begin:end]
                slot[1, :, : end - begin] = self.v_all[b, :, begin:end]
                for unit in self.dkv_table[b, page].tolist():
                    if unit >= 0:
                        self.dkv_pool[unit] = 0

    def chunk(self) -> _C.Chunk:
        visibility = _C.Visibility(
            window=self.case.window, first_key=self.first_key, num_keys=self.num_keys
        )
        cap = self.case.softcap
        return _C.Chunk(
            q=self.q, k=self.k, v=self.v, scale=self.scale, cap=cap, visibility=visibility
        )

    def past(self) -> _C.PastPages:
        return _C.PastPages(
            page_size=self.case.page_size,
            pool=pool_of(self.kv_pool),
            block_table=self.block_table,
            num_tokens=self.case.num_past,
            selection=self.selection,
        )

    def gradients(self, seed: int) -> _C.GradientPages:
        return _C.GradientPages(
            pool=pool_of(self.dkv_pool),
            table=self.dkv_table,
            dtype=str(self.case.dkv_dtype).removeprefix("torch."),
            rounding_seed=seed,
        )

    def waves(self, borders: tuple[int, ...]) -> list[_C.Wave]:
        spans = list(itertools.pairwise([0, *borders, self.case.pages]))
        return [
            _C.Wave(begin=begin, end=end, first=i == 0, last=i == len(spans) - 1)
            for i, (begin, end) in enumerate(spans)
        ]

    def forward(self, borders: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        o = torch.full_like(self.q, POISON)
        lse = torch.full(self.q.shape[:3], POISON, dtype=case.real)
        acc = torch.full(self.q.shape, POISON, dtype=case.real)
        stats = [torch.full(self.q.shape[:3], POISON, dtype=case.real) for _ in range(2)]
        state = _C.SoftmaxState(acc=acc, max=stats[0], sum=stats[1])
        output = _C.Output(o=o, lse=lse)
        for wave in self.waves(borders):
            _C.attention_forward(
                chunk=self.chunk(), past=self.past(), output=output, wave=wave, state=state
            )
        return o, lse

    def backward(
        self, o: torch.Tensor, lse: torch.Tensor, borders: tuple[int, ...] = (), seed: int = 7
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, and dk and dv of all keys, past ones read back from the gradient pages."""
        case = self.case
        dq = torch.full_like(self.q, POISON)
        dk, dv = torch.full_like(self.k, POISON), torch.full_like(self.v, POISON)
        dq_acc = torch.full(self.q.shape, POISON, dtype=case.real)
        delta = torch.full(self.q.shape[:3], POISON, dtype=case.real)
        for wave in self.waves(borders):
            _C.attention_backward(
                chunk=self.chunk(),
                past=self.past(),
                output=_C.Output(o=o, lse=lse),
                d_output=_C.Output(o=self.d_o, lse=self.d_lse),
                d_chunk=_C.ChunkGradients(dq=dq, dk=dk, dv=dv),
                state=_C.BackwardState(delta=delta, dq_acc=dq_acc),
                gradients=self.gradients(seed),
                wave=wave,
            )
        past = [self.past_gradient(kind).to(case.real) for kind in range(2)]
        return (
            dq,
            torch.cat([past[0], dk.to(case.real)], 2),
            torch.cat([past[1], dv.to(case.real)], 2),
        )

    def past_gradient(self, kind: int) -> torch.Tensor:
        """[B, Hkv, N, D] of the gradient pages; zero where none is wanted."""
        case = self.case
        shape = (case.batch, case.kv_heads, case.num_past, case.head_dim)
        result = torch.zeros(shape, dtype=case.dkv_dtype)
        for b in range(case.batch):
            for page in range(case.pages):
                unit = int(self.dkv_table[b, page, kind])
                begin = page * case.page_size
                end = min(begin + case.page_size, case.num_past)
                if unit >= 0:
                    result[b, :, begin:end] = self.dkv_pool[unit, :, : end - begin]
        return result

    def mask(self) -> torch.Tensor:
        """[B, Hkv, C, N + C]: who sees whom, from the definition."""
        case = self.case
        n = case.num_past
        key = torch.arange(n + case.chunk)
        position = n + torch.arange(case.chunk)[:, None]
        seen = (key <= position).expand(case.batch, case.kv_heads, -1, -1).clone()
        if case.window:
            seen &= key > position - case.window
        if self.first_key is not None:
            seen &= (key >= self.first_key[:, :, None])[:, None]
        if self.num_keys is not None:
            seen &= (key < self.num_keys[:, None])[:, None, None, :]
        if self.selection is not None:
            lists = self.selection.expand(-1, -1, case.kv_heads, -1).transpose(1, 2)
            listed = torch.zeros(case.batch, case.kv_heads, case.blocks, case.pages + 1)
            listed = listed.scatter(3, lists.long().where(lists >= 0, case.pages), 1.0).bool()
            page = key[:n] // case.page_size
            block = torch.arange(case.chunk) // case.page_size
            seen[..., :n] &= listed[:, :, block][..., page]
        return seen

    def reference(self) -> dict[str, torch.Tensor]:
        """Ordinary attention in float64 with autograd."""
        case = self.case
        group = case.query_heads // case.kv_heads
        seen = self.mask()
        used = seen.any(2)[..., None]
        q = self.q.double().detach().requires_grad_()
        k = self.k_all.double().where(used, 0).requires_grad_()
        v = self.v_all.double().where(used, 0).requires_grad_()
        scores = (q.unflatten(1, (case.kv_heads, group)) @ k[:, :, None].mT) * self.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~seen[:, :, None], -math.inf)
        lse = scores.logsumexp(-1)
        nothing = lse == -math.inf
        weights = (scores - lse.where(~nothing, 0)[..., None]).exp()
        o = (weights @ v[:, :, None]).flatten(1, 2)
        lse = lse.flatten(1, 2)
        loss = (o * self.d_o.double()).sum()
        loss = loss + (lse.where(lse > -math.inf, 0) * self.d_lse.double()).sum()
        loss.backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        dk, dv = k.grad, v.grad
        for page in case.no_gradient_pages:
            tokens = slice(page * case.page_size, min((page + 1) * case.page_size, case.num_past))
            dk[:, :, tokens] = 0
            dv[:, :, tokens] = 0
        return {"o": o.detach(), "lse": lse.detach(), "dq": q.grad, "dk": dk, "dv": dv}


def pool_of(slots: torch.Tensor) -> _C.PagePool:
    return _C.PagePool(
        address=slots.data_ptr(),
        slot_bytes=slots.stride(0) * slots.element_size(),
        num_slots=len(slots),
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b; equal infinities count as equal."""
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite), "finite in one, not in the other"
    assert torch.equal(a.double()[~finite], b.double()[~finite])
    difference = (a.double() - b.double())[finite].norm()
    norm = b.double()[finite].norm()
    return float(difference / norm) if norm > 0 else float(difference)
