"""Attention kernels beside the alternatives, in one process: TFLOP/s and ratios.

    python bench/attention.py              # Qwen2.5-7B heads, the shapes of docs/performance.md
    python bench/attention.py --grid       # chunks, pasts, budgets, groups, head dims
    python bench/attention.py --json result.json

Forward FLOPs are 4 * query_heads * head_dim per visible (query, key) pair, the causal part of the
chunk counted half; backward 2.5 times that. Medians of CUDA-event times; inputs are random. Not
every SDPA backend has a causal mask for queries at the end of longer keys: SDPA runs unmasked over
all keys, and all pairs it computes are counted, which flatters it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oomb import _C


@dataclasses.dataclass(frozen=True)
class Shape:
    chunk: int = 8192
    past: int = 131072
    budget: int | None = None  # pages per query block; None: all
    query_heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    page_size: int = 128

    @property
    def flops(self) -> float:
        seen = self.past if self.budget is None else min(self.past, self.budget * self.page_size)
        pairs = self.chunk * seen + self.chunk * self.chunk / 2
        return 4.0 * self.query_heads * self.head_dim * pairs

    @property
    def unmasked_flops(self) -> float:
        return 4.0 * self.query_heads * self.head_dim * self.chunk * (self.past + self.chunk)

    @property
    def pages(self) -> int:
        return self.past // self.page_size


HEADLINE = [Shape(chunk=chunk, budget=budget) for budget in (None, 64) for chunk in (4096, 8192)]


def grid() -> list[Shape]:
    """One axis at a time around the headline shape."""
    shapes = [Shape(chunk=c, budget=b) for b in (None, 64) for c in (2048, 4096, 8192, 16384)]
    shapes += [Shape(past=n, budget=b) for b in (None, 64) for n in (0, 16384, 1048576)]
    shapes += [Shape(budget=b) for b in (16, 32, 128, 256)]
    for budget in (None, 64):
        for group in (1, 4, 8):
            shapes.append(Shape(chunk=4096, budget=budget, query_heads=4 * group))
        for page in (64, 128):
            shapes.append(Shape(chunk=4096, budget=budget, head_dim=64, page_size=page))
        shapes.append(Shape(chunk=4096, budget=budget, page_size=64))
    return shapes


class Inputs:
    """q, k, v and the past, as slots of a page pool and as the contiguous tensors others need."""

    def __init__(self, shape: Shape) -> None:
        s = shape
        self.shape = shape
        kwargs = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn(1, s.query_heads, s.chunk, s.head_dim, **kwargs)
        self.k = torch.randn(1, s.kv_heads, s.chunk, s.head_dim, **kwargs)
        self.v = torch.randn_like(self.k)
        slots = max(s.pages, 1)
        self.pool = torch.randn(slots, 2, s.kv_heads, s.page_size, s.head_dim, **kwargs)
        table = torch.randperm(slots, device="cuda").to(torch.int32)
        self.block_table = table[None]
        ordered = self.pool[table.long()][: s.pages].permute(1, 2, 0, 3, 4)
        past = ordered.reshape(2, 1, s.kv_heads, s.past, s.head_dim)
        self.all_k = torch.cat([past[0], self.k], dim=2)
        self.all_v = torch.cat([past[1], self.v], dim=2)
        self.selection: Tensor | None = None
        if s.budget is not None and s.past > 0:
            blocks = s.chunk // s.page_size
            count = min(s.budget, s.pages)
            scores = torch.rand(1, blocks, 1, s.pages, device="cuda")
            chosen = scores.topk(count, dim=-1).indices.sort(dim=-1).values
            self.selection = chosen.to(torch.int32)
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:3], device="cuda")

    def past_arguments(self) -> dict[str, object]:
        s = self.shape
        return {
            "scale": s.head_dim**-0.5,
            "page_size": s.page_size,
            "kv_pool": self.pool.data_ptr(),
            "kv_slot_bytes": self.pool[0].numel() * self.pool.element_size(),
            "kv_num_slots": self.pool.shape[0],
            "block_table": self.block_table,
            "num_past": s.past,
            "page_begin": 0,
            "page_end": s.pages,
            "selection": self.selection,
            "stream": torch.cuda.current_stream().cuda_stream,
        }


def ours(inputs: Inputs) -> Callable[[], object]:
    arguments = inputs.past_arguments()

    def call() -> Tensor:
        _C.attention_forward(
            q=inputs.q, k=inputs.k, v=inputs.v, o=inputs.o, lse=inputs.lse, **arguments
        )
        return inputs.o

    return call


def sdpa(inputs: Inputs, backend: SDPBackend) -> Callable[[], object]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                inputs.q, inputs.all_k, inputs.all_v, enable_gqa=True
            )

    return call


def flex(inputs: Inputs) -> Callable[[], object]:
    """FlexAttention over the same page lists and the causal chunk, keys contiguous."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    s = inputs.shape
    block, past_blocks, blocks = s.page_size, s.pages, s.chunk // s.page_size
    total = past_blocks + blocks
    full = torch.zeros(blocks, total, device="cuda", dtype=torch.bool)
    if inputs.selection is None:
        full[:, :past_blocks] = True
    else:
        full[:, :past_blocks].scatter_(1, inputs.selection[0, :, 0].long(), True)
    earlier = torch.ones(blocks, blocks, device="cuda").tril(-1).bool()
    full[:, past_blocks:] = earlier
    counts = full.sum(-1, dtype=torch.int32)
    indices = full.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    diagonal = torch.zeros(blocks, total, device="cuda", dtype=torch.int32)
    diagonal[:, 0] = past_blocks + torch.arange(blocks, device="cuda")

    past = s.past

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row + past >= key

    mask = BlockMask.from_kv_blocks(
        torch.ones_like(counts)[None, None],
        diagonal[None, None],
        counts[None, None],
        indices[None, None].contiguous(),
        BLOCK_SIZE=(block, block),
        mask_mod=causal,
        seq_lengths=(s.chunk, s.past + s.chunk),
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> object:
        return compiled(inputs.q, inputs.all_k, inputs.all_v, block_mask=mask, enable_gqa=True)

    return call


def median_ms(call: Callable[[], object], repetitions: int) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(repetitions):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def bench_forward(shape: Shape, repetitions: int) -> dict[str, object]:
    inputs = Inputs(shape)
    calls = {"oomb": ours(inputs)}
    if inputs.selection is None:
        calls["cudnn"] = sdpa(inputs, SDPBackend.CUDNN_ATTENTION)
        calls["flash2"] = sdpa(inputs, SDPBackend.FLASH_ATTENTION)
    else:
        calls["flex"] = flex(inputs)
    row: dict[str, object] = {"pass": "forward", **dataclasses.asdict(shape)}
    expected = None
    for name, call in calls.items():
        try:
            result = call()
        except RuntimeError as error:
            row[f"{name}_error"] = str(error)[:200]
            continue
        if name == "oomb":
            expected = result.float()  # type: ignore[attr-defined]
        elif name == "flex":
            # It computes the same thing, or the ratio says nothing.
            difference = (result.float() - expected).abs().max().item()  # type: ignore
            assert difference < 0.02, f"{name} and oomb differ by {difference}"
        milliseconds = median_ms(call, repetitions)
        flops = shape.unmasked_flops if name in ("cudnn", "flash2") else shape.flops
        row[f"{name}_ms"] = milliseconds
        row[f"{name}_tflops"] = flops / milliseconds / 1e9
    others = [row[f"{n}_tflops"] for n in calls if n != "oomb" and f"{n}_tflops" in row]
    if others:
        row["ratio"] = row["oomb_tflops"] / max(others)  # type: ignore
    return row


def matmul_tflops(repetitions: int) -> float:
    """The ceiling: a bf16 matrix product of 8192 cubed."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return 2 * 8192**3 / median_ms(lambda: a @ b, repetitions) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", action="store_true", help="the full grid of shapes")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()

    torch.manual_seed(0)
    ceiling = matmul_tflops(options.repetitions)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, matrix product {ceiling:.0f} TFLOP/s")
    rows = []
    for shape in grid() if options.grid else HEADLINE:
        row = bench_forward(shape, options.repetitions)
        rows.append(row)
        figures = "  ".join(
            f"{key.removesuffix('_tflops')} {value:.0f}"
            for key, value in row.items()
            if key.endswith("_tflops")
        )
        ratio = f"  ratio {row['ratio']:.2f}" if "ratio" in row else ""
        print(f"forward  {shape}: {figures}{ratio}", flush=True)
        torch.cuda.empty_cache()
    if options.json is not None:
        result = {
            "date": datetime.date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
            "matmul_tflops": ceiling,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
