"""CPU attention of one chunk beside torch's SDPA on the same tensors, in one process.

    python bench/cpu_attention.py [--dtype float32] [--past 7168] [--repeat 5]

The work is that of a chunk in a long sequence: its queries see all of the past and, in
causal order, the chunk itself. SDPA takes the mask that says so; a second comparison gives it an
advantage, no mask at all over as many keys as a query sees on average, so that it runs its fastest
path. The GFLOP/s of both count the products that the visible pairs need (2 in the forward, 5 in the
backward).
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support.record import write_record

from oomb import _C
from oomb.ops.pages import pool_of

Run = Callable[[], object]


def seconds(runs: dict[str, Run], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median of each, taken in turns so that a busy machine disturbs all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if turn > 0:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class Chunk:
    """One chunk's tensors and the pages of its past."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        a = arguments
        self.dtype = getattr(torch, a.dtype)
        self.past, self.page_size = a.past, a.page_size
        pages = -(-a.past // a.page_size)
        shape = (1, a.kv_heads, a.past + a.chunk, a.head_dim)
        torch.manual_seed(0)
        self.q = torch.randn(1, a.heads, a.chunk, a.head_dim).to(self.dtype)
        self.k = torch.randn(shape).to(self.dtype)
        self.v = torch.randn(shape).to(self.dtype)
        self.d_o = torch.randn_like(self.q)
        self.scale = a.head_dim**-0.5
        self.pool = torch.zeros(max(pages, 1), 2, a.kv_heads, a.page_size, a.head_dim)
        self.pool = self.pool.to(self.dtype)
        self.table = torch.arange(pages, dtype=torch.int32)[None]
        real = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.gradients = torch.zeros(2 * max(pages, 1), *self.pool.shape[2:], dtype=real)
        gradient_table = torch.arange(2 * pages, dtype=torch.int32).view(1, pages, 2)
        slots = torch.full((1, pages + -(-a.chunk // a.page_size)), -1, dtype=torch.int32)
        slots[:, :pages] = self.table
        if pages:
            _C.page_write(
                k=self.k, v=self.v, pool=pool_of(self.pool), slots=slots,
                page_begin=0, page_end=pages, page_size=a.page_size,
            )  # fmt: skip
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:3], dtype=real)
        self.delta = torch.empty_like(self.lse)
        own_k, own_v = self.k[:, :, a.past :], self.v[:, :, a.past :]
        self.common = {
            "chunk": _C.Chunk(q=self.q, k=own_k, v=own_v, scale=self.scale),
            "past": _C.PastPages(
                page_size=a.page_size, pool=pool_of(self.pool), block_table=self.table,
                num_tokens=a.past,
            ),
            "output": _C.Output(o=self.o, lse=self.lse),
        }  # fmt: skip
        self.d_chunk = _C.ChunkGradients(
            dq=torch.empty_like(self.q), dk=torch.empty_like(own_k), dv=torch.empty_like(own_v)
        )
        self.gradient_pages = _C.GradientPages(
            pool=pool_of(self.gradients),
            table=gradient_table,
            dtype=str(real).removeprefix("torch."),
        )

    def forward(self) -> None:
        _C.attention_forward(**self.common)

    def backward(self) -> None:
        _C.attention_backward(
            **self.common,
            d_output=_C.Output(o=self.d_o),
            d_chunk=self.d_chunk,
            state=_C.BackwardState(delta=self.delta),
            gradients=self.gradient_pages,
        )

    def sdpa(self, keys: int, mask: torch.Tensor | None) -> tuple[Run, Run]:
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q.clone().requires_grad_()
        k = self.k[:, :, :keys].repeat_interleave(group, 1).requires_grad_()
        v = self.v[:, :, :keys].repeat_interleave(group, 1).requires_grad_()

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)

        def forward() -> None:
            with torch.no_grad():
                run()

        def both() -> None:
            torch.autograd.grad(run(), (q, k, v), self.d_o)

        return forward, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in [
        ("heads", 12), ("kv-heads", 4), ("chunk", 1024), ("head-dim", 64), ("past", 7168),
        ("page-size", 128), ("repeat", 5), ("threads", torch.get_num_threads()),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time, for a machine that is busy"
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers here")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if arguments.cpu_time:
        arguments.threads = 1
    torch.set_num_threads(arguments.threads)
    _C.set_num_threads(arguments.threads)

    chunk = Chunk(arguments)
    rows, past = arguments.chunk, arguments.past
    mask = torch.ones(rows, past + rows, dtype=torch.bool).tril(past)
    average = past + rows // 2
    masked, masked_both = chunk.sdpa(past + rows, mask)
    plain, plain_both = chunk.sdpa(average, None)

    def both() -> None:
        chunk.forward()
        chunk.backward()

    times = seconds(
        {
            "forward": chunk.forward, "forward_backward": both,
            "sdpa_masked_forward": masked, "sdpa_masked_forward_backward": masked_both,
            "sdpa_plain_forward": plain, "sdpa_plain_forward_backward": plain_both,
        },
        arguments.repeat,
        clock,
    )  # fmt: skip
    product = 2 * arguments.heads * arguments.head_dim * rows * average / 1e9
    size = 1536
    a, b = torch.randn(size, size), torch.randn(size, size)
    sgemm = 2 * size**3 / 1e9 / seconds({"a": lambda: a @ b}, arguments.repeat, clock)["a"]

    print(
        f"{_C.cpu_instruction_set()}, {arguments.threads} threads, torch sgemm {sgemm:.0f} GFLOP/s"
    )
    for name, value in times.items():
        work = product * (7 if name.endswith("backward") else 2)
        print(f"{name:30} {value * 1e3:9.1f} ms {work / value:7.0f} GFLOP/s")
    for part in ("forward", "forward_backward"):
        for other in ("masked", "plain"):
            ratio = times[part] / times[f"sdpa_{other}_{part}"]
            print(f"{part:18} takes {ratio:.2f} x the time of SDPA ({other})")
    if arguments.json:
        record = {
            "configuration": {k: v for k, v in vars(arguments).items() if k != "json"},
            "instruction_set": _C.cpu_instruction_set(),
            "torch": torch.__version__,
            "sgemm_gflops": sgemm,
            "seconds": times,
        }
        write_record(arguments.json, record)


if __name__ == "__main__":
    main()
