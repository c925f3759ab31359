"""What the benchmarks of attention share: shapes, inputs, alternatives, timing, and results.

Forward FLOPs are 2 * query_heads * (head_dim + value_dim) per visible (query, key) pair, the causal
part of the chunk counted half; backward 2.5 times that. Zeros behind a head are not counted.
Medians of CUDA-event times; inputs are random. Not every SDPA backend has a causal mask for queries
at the end of longer keys: SDPA runs unmasked over all keys, and all pairs it computes are counted,
which flatters it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.record import RESULTS, write_record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from oomb import _C
from oomb.cli.bench_selection import SyntheticPages
from oomb.ops.launch import workspace_on
from oomb.ops.pages import pool_of

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    chunk: int = 8192
    past: int = 131072
    budget: int | None = None  # pages per query block; None: all
    query_heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    page_size: int = 128
    softcap: float = 0.0  # of the scores; 0: none
    value_dim: int | None = None  # of values narrower than the keys; None: head_dim
    lists: str = "uniform"  # or "synthetic", of oomb bench step: pages that many blocks list

    @property
    def flops(self) -> float:
        seen = self.past if self.budget is None else min(self.past, self.budget * self.page_size)
        pairs = self.chunk * seen + self.chunk * self.chunk / 2
        return self._flops_of_a_pair * pairs

    @property
    def unmasked_flops(self) -> float:
        return self._flops_of_a_pair * self.chunk * (self.past + self.chunk)

    @property
    def _flops_of_a_pair(self) -> float:
        return 2.0 * self.query_heads * (self.head_dim + self.values)

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def padded(self) -> int:
        """What our kernels run on: the head with zeros behind it, as the engine pads it."""
        return int(_C.attention_head_dim(self.head_dim, 90))

    @property
    def pages(self) -> int:
        return self.past // self.page_size

    def __str__(self) -> str:
        what = "dense" if self.budget is None else f"{self.budget} pages"
        what += " (synthetic)" if self.lists == "synthetic" else ""
        return (
            f"{what}, chunk {self.chunk}, past {self.past}, {self.query_heads}/{self.kv_heads} "
            f"heads of {self.head_dim}"
            + (f", values of {self.values}" if self.value_dim else "")
            + f", pages of {self.page_size}"
            + (f", capped at {self.softcap:g}" if self.softcap else "")
        )


HEADLINE = [Shape(chunk=chunk, budget=budget) for budget in (None, 64) for chunk in (4096, 8192)]


# Query and key/value heads by head dim: 512 is that of Gemma 4 31B's global layers.
WIDE = {256: (16, 4), 512: (32, 4)}


def headline(options: argparse.Namespace) -> list[Shape]:
    """The tables of docs/performance.md: Hopper, the path for other GPUs, wide heads, values
    narrower than keys."""
    heads: dict[str, Any] = {}
    if options.wide is not None:
        heads = dict(zip(("query_heads", "kv_heads"), WIDE[options.wide], strict=True))
        heads["head_dim"] = options.wide
    elif options.narrow_values:
        heads = {"query_heads": 16, "kv_heads": 4, "head_dim": 192, "value_dim": 128}
    elif options.synthetic:
        cases = [(4096, 131072), (8192, 131072), (4096, 1048576)]
        return [Shape(chunk, past, 64, lists="synthetic") for chunk, past in cases]
    elif options.path == "sm80":
        return [dataclasses.replace(shape, head_dim=d) for d in (128, 64) for shape in HEADLINE]
    return [dataclasses.replace(shape, **heads) for shape in HEADLINE]


def grid() -> list[Shape]:
    """One axis at a time around chunk 4096 after 131,072 tokens."""
    middle = Shape(chunk=4096)
    shapes = [dataclasses.replace(middle, budget=b) for b in (16, 32, 64, 128, 256)]
    for budget in (None, 64):
        around = dataclasses.replace(middle, budget=budget)
        shapes += [dataclasses.replace(around, chunk=c) for c in (2048, 4096, 8192, 16384)]
        pasts = (0, 16384, 1048576) if budget is None else (16384, 1048576)
        shapes += [dataclasses.replace(around, past=n) for n in pasts]
        shapes += [dataclasses.replace(around, query_heads=4 * g) for g in (1, 4, 8)]
        shapes += [
            dataclasses.replace(around, head_dim=d, page_size=p)
            for d, p in ((64, 64), (64, 128), (128, 64))
        ]
    return list(dict.fromkeys(shapes))


class Inputs:
    """q, k, v and the past: pages with zeros behind heads; contiguous heads alone for others."""

    def __init__(self, shape: Shape) -> None:
        s = shape
        self.shape = shape
        kwargs: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn(1, s.query_heads, s.chunk, s.padded, **kwargs)
        self.k = torch.randn(1, s.kv_heads, s.chunk, s.padded, **kwargs)
        self.v = torch.randn_like(self.k)
        slots = max(s.pages, 1)
        self.pool = torch.randn(slots, 2, s.kv_heads, s.page_size, s.padded, **kwargs)
        for keys in (self.q, self.k, self.pool[:, 0]):
            keys[..., s.head_dim :] = 0
        for values in (self.v, self.pool[:, 1]):
            values[..., s.values :] = 0
        table = torch.randperm(slots, device="cuda").to(torch.int32)
        self.block_table = table[None]
        ordered = self.pool[table.long()][: s.pages].permute(1, 2, 0, 3, 4)
        past = ordered.reshape(2, 1, s.kv_heads, s.past, s.padded)
        self.all_q = self.q[..., : s.head_dim].contiguous()
        self.all_k = torch.cat([past[0], self.k], dim=2)[..., : s.head_dim].contiguous()
        self.all_v = torch.cat([past[1], self.v], dim=2)[..., : s.values].contiguous()
        self.selection: Tensor | None = None
        if s.budget is not None and s.past > 0:
            blocks = s.chunk // s.page_size
            count = min(s.budget, s.pages)
            if s.lists == "synthetic":
                rule = SyntheticPages(budget=s.budget, layers=1, blocks=blocks)
                self.selection = rule.drawn(s.pages, 1, torch.device("cuda"))[0].contiguous()
            else:
                scores = torch.rand(1, blocks, 1, s.pages, device="cuda")
                chosen = scores.topk(count, dim=-1).indices.sort(dim=-1).values
                self.selection = chosen.to(torch.int32)
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:3], device="cuda")

    def past_arguments(self) -> dict[str, Any]:
        s = self.shape
        return {
            "chunk": _C.Chunk(q=self.q, k=self.k, v=self.v, scale=s.head_dim**-0.5, cap=s.softcap),
            "past": _C.PastPages(
                page_size=s.page_size,
                pool=pool_of(self.pool),
                block_table=self.block_table,
                num_tokens=s.past,
                selection=self.selection,
            ),
            "output": _C.Output(o=self.o, lse=self.lse),
            "stream": torch.cuda.current_stream().cuda_stream,
        }


def forward(inputs: Inputs) -> Callable[[], Tensor]:
    """Ours."""
    arguments = inputs.past_arguments()

    def call() -> Tensor:
        _C.attention_forward(**arguments, workspace=workspace_on(inputs.q.device))
        return inputs.o

    return call


def sdpa(inputs: Inputs, backend: SDPBackend) -> Callable[[], Tensor]:
    """FlashAttention-2 takes values as wide as the keys alone: it gets zeros behind them."""
    s = inputs.shape
    behind = s.head_dim - s.values if backend == SDPBackend.FLASH_ATTENTION else 0

    def call() -> Tensor:
        values = pad(inputs.all_v, (0, behind)) if behind else inputs.all_v
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(inputs.all_q, inputs.all_k, values, enable_gqa=True)
        return o[..., : s.values]

    return call


def flex(inputs: Inputs) -> Callable[[], Tensor]:
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

    def capped(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return s.softcap * torch.tanh(score / s.softcap)

    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        o = compiled(
            inputs.all_q,
            inputs.all_k,
            inputs.all_v,
            score_mod=capped if s.softcap else None,
            block_mask=mask,
            enable_gqa=True,
        )
        assert isinstance(o, Tensor)
        return o

    return call


def alternatives(
    inputs: Inputs, path: str | None, everything: bool
) -> dict[str, Callable[[], Tensor]]:
    """Their forwards by name; FlashAttention-2 alone beside the path for other GPUs.

    cuDNN and FlashAttention-2 take heads up to 256, and SDPA has no soft caps.

    Not everything: without the one that is never the best, and FlexAttention, which compiles every
    shape anew, only for the heads and pages in the middle of the grid.
    """
    if inputs.shape.softcap:
        return {"flex": flex(inputs)}
    if inputs.shape.head_dim > 256:
        efficient = {"efficient": sdpa(inputs, SDPBackend.EFFICIENT_ATTENTION)}
        return {"flex": flex(inputs)} | (efficient if inputs.selection is None else {})
    if inputs.selection is None:
        flash = {"flash2": sdpa(inputs, SDPBackend.FLASH_ATTENTION)}
        cudnn = {"cudnn": sdpa(inputs, SDPBackend.CUDNN_ATTENTION)}
        return flash if path else cudnn | (flash if everything else {})
    s = inputs.shape
    usual = s == Shape(chunk=s.chunk, past=s.past, budget=s.budget)
    return {"flex": flex(inputs)} if not path and (everything or usual) else {}


def median_ms(call: Call, repetitions: int, longest: float = 1.0) -> float:
    """After a warm-up; at least three runs, and no more than fit into ``longest`` seconds."""
    times = []
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for run in range(1 + repetitions):
        begin.record()
        call()
        end.record()
        end.synchronize()
        if run > 0:
            times.append(begin.elapsed_time(end))
        if len(times) >= 3 and sum(times) > 1e3 * longest:
            break
    return statistics.median(times)


def measure(
    row: dict[str, Any], name: str, call: Callable[[], Call], flops: float, repetitions: int
) -> float:
    """Adds ``name``'s time and TFLOP/s, or why there are none; returns TFLOP/s or 0."""
    try:
        milliseconds = median_ms(call(), repetitions)
    except (RuntimeError, AssertionError) as error:
        row[f"{name}_error"] = str(error)[:200]
        return 0.0
    row[f"{name}_ms"] = milliseconds
    row[f"{name}_tflops"] = flops / milliseconds / 1e9
    return float(row[f"{name}_tflops"])


def matmul_tflops(repetitions: int) -> float:
    """The ceiling: a bf16 matrix product of 8192 cubed."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return 2 * 8192**3 / median_ms(lambda: a @ b, repetitions) / 1e9


def device_name() -> str:
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")


def write_json(path: Path | None, kind: str, result: dict[str, Any]) -> None:
    """To ``path``; "-" for bench/results/<kind>-<device>-<date>.json."""
    if path is None:
        return
    date = datetime.date.today().isoformat()
    if str(path) == "-":
        path = RESULTS / f"{kind}-{device_name()}-{date}.json"
    head = {
        "date": date,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    write_record(path, head | result)
    print(f"wrote {path}")


def parser(doc: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=doc.splitlines()[0])
    result.add_argument("--grid", action="store_true", help="the grid of shapes")
    heads = result.add_mutually_exclusive_group()
    heads.add_argument(
        "--wide",
        type=int,
        nargs="?",
        const=256,
        choices=list(WIDE),
        help="16 and 4 heads of 256, or 32 and 4 of 512",
    )
    heads.add_argument(
        "--narrow-values", action="store_true", help="16 and 4 heads of 192, values of 128"
    )
    heads.add_argument(
        "--synthetic", action="store_true", help="64 pages, some in every list, as of a bench step"
    )
    result.add_argument(
        "--softcap", type=float, default=0.0, help="of the scores, beside FlexAttention alone"
    )
    result.add_argument(
        "--path",
        choices=["sm80", "sm80-small", "plain"],
        help="force the path for other GPUs, its small tiles (with --wide), or the slow one",
    )
    result.add_argument("--repetitions", type=int, default=7)
    result.add_argument("--seconds", type=float, help="begin no further shape after that long")
    result.add_argument(
        "--json", type=Path, help="write the rows there; -: bench/results, with the usual name"
    )
    return result


def run(kind: str, options: argparse.Namespace, bench: Callable[[Shape], dict[str, Any]]) -> None:
    """Benches every shape that the options ask for; prints and writes the rows."""
    begin = time.monotonic()
    torch.manual_seed(0)
    _C.force_attention(options.path)
    ceiling = matmul_tflops(options.repetitions)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"matrix product {ceiling:.0f} TFLOP/s"
    )
    shapes = grid() if options.grid else headline(options)
    shapes = [dataclasses.replace(shape, softcap=options.softcap) for shape in shapes]
    rows = []
    for index, shape in enumerate(shapes):
        seconds = time.monotonic() - begin
        if options.seconds is not None and seconds > options.seconds:
            print(f"{seconds:.0f} s: left out the last {len(shapes) - index} shapes")
            break
        row = {"pass": kind, **dataclasses.asdict(shape), **bench(shape)}
        rows.append(row)
        figures = [f"{k[:-7]} {v:.0f}" for k, v in row.items() if k.endswith("_tflops")]
        ratios = [f"{k} {v:.2f}" for k, v in row.items() if k.endswith("ratio")]
        errors = [f"{k[:-6]}: {v}" for k, v in row.items() if k.endswith("_error")]
        print(f"{kind} {shape}: " + "  ".join(figures + ratios + errors), flush=True)
        torch.cuda.empty_cache()
    wide = {None: [], 256: ["wide"]}.get(options.wide, [f"wide-{options.wide}"])
    capped = ["capped"] if options.softcap else []
    variant = (["grid"] if options.grid else []) + wide + capped
    variant += ["narrow-values"] if options.narrow_values else []
    variant += ["synthetic"] if options.synthetic else []
    variant += ["bf16-pages"] if getattr(options, "bf16_pages", False) else []
    name = "-".join(["attention", kind, *variant, options.path or ""])
    seconds = time.monotonic() - begin
    found = {"matmul_tflops": ceiling, "path": options.path, "seconds": seconds, "rows": rows}
    write_json(options.json, name.rstrip("-"), found)
