"""The attention of one chunk beside the alternatives, in one process: TFLOP/s and ratios.

    python bench/attention.py                       # forward and backward of Qwen2.5-7B's heads
    python bench/attention.py --only backward       # one of the two
    python bench/attention.py --path sm80           # the path for other GPUs
    python bench/attention.py --wide                # 16 query and 4 key/value heads of 256
    python bench/attention.py --wide 512            # 32 and 4 of 512, Gemma 4's global layers
    python bench/attention.py --narrow-values       # 16 and 4 heads of 192 whose values have 128
    python bench/attention.py --synthetic           # 64 pages, 12 of which all blocks list
    python bench/attention.py --wide --softcap 50   # scores under a soft cap, as Gemma 2 has them
    python bench/attention.py --grid                # chunks, pasts, budgets, groups, head dims
    python bench/attention.py --json -              # attention-<pass>-<device>-<date>.json
    python bench/attention.py --plot                # docs/images/attention.png from both grids

The backward is counted as 2.5 times the forward; bench/support/attention_problem.py says how FLOPs
are counted. In the backward "oomb" is the default, deterministic; "oomb_fused" is
deterministic=False. Gradient pages are fp32 unless --bf16-pages. Needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import attention_problem
from support.attention_problem import Call, Inputs, Shape, alternatives, forward, measure
from torch import Tensor

from oomb import _C
from oomb.ops.pages import pool_of


def bench_forward(shape: Shape, repetitions: int, path: str | None, flash: bool) -> dict[str, Any]:
    inputs = Inputs(shape)
    row: dict[str, Any] = {}
    ours = forward(inputs)
    rate = measure(row, "oomb", lambda: ours, shape.flops, repetitions)
    expected = ours()[..., : shape.values].float()

    def checked(name: str) -> Call:
        call = others[name]
        if name == "flex":  # it computes the same thing, or the ratio says nothing
            difference = (call().float() - expected).abs().max().item()
            assert difference < 0.02, f"{name} and oomb differ by {difference}"
        return call

    others = alternatives(inputs, path, flash)
    best = 0.0
    for name in others:
        flops = shape.flops if name == "flex" else shape.unmasked_flops
        best = max(best, measure(row, name, partial(checked, name), flops, repetitions))
    if best > 0:
        row["ratio"] = rate / best
    return row


class Gradients:
    """d_o, and where our backward puts what it finds."""

    def __init__(self, inputs: Inputs, pages_dtype: torch.dtype) -> None:
        s = inputs.shape
        self.d_o = torch.randn_like(inputs.q)
        self.d_o[..., s.values :] = 0
        self.dq = torch.empty_like(inputs.q)
        self.dk, self.dv = torch.empty_like(inputs.k), torch.empty_like(inputs.v)
        self.delta = torch.empty_like(inputs.lse)
        units = 2 * max(s.pages, 1)
        tile = (s.kv_heads, s.page_size, s.padded)
        self.pool = torch.zeros(units, *tile, device="cuda", dtype=pages_dtype)
        table = torch.randperm(units, device="cuda").to(torch.int32)
        self.pages = _C.GradientPages(
            pool=pool_of(self.pool),
            table=table.view(1, -1, 2).contiguous(),
            dtype="float32" if pages_dtype == torch.float32 else "bfloat16",
        )
        self.workspace: Tensor | None = None

    def room(self, size: int) -> Tensor:
        if self.workspace is None or self.workspace.numel() < size:
            self.workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        return self.workspace


def backward(inputs: Inputs, gradients: Gradients, deterministic: bool) -> Call:
    arguments = inputs.past_arguments()
    g = gradients

    def call() -> None:
        _C.attention_backward(
            **arguments,
            d_output=_C.Output(o=g.d_o),
            d_chunk=_C.ChunkGradients(dq=g.dq, dk=g.dk, dv=g.dv),
            state=_C.BackwardState(delta=g.delta),
            gradients=g.pages if inputs.shape.pages else None,
            deterministic=deterministic,
            workspace=g.room,
        )

    return call


def autograd(inputs: Inputs, forward: Callable[[], Tensor], d_o: Tensor) -> Call:
    leaves = [inputs.all_q, inputs.all_k, inputs.all_v]
    for leaf in leaves:
        leaf.requires_grad_()
    o = forward()

    def call() -> object:
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    return call


def bench_backward(
    shape: Shape, repetitions: int, path: str | None, flash: bool, pages_dtype: torch.dtype
) -> dict[str, Any]:
    inputs = Inputs(shape)
    gradients = Gradients(inputs, pages_dtype)
    forward(inputs)()  # o and lse
    row: dict[str, Any] = {"pages_dtype": str(pages_dtype).removeprefix("torch.")}
    for name, deterministic in (("oomb", True), ("oomb_fused", False)):
        measure(
            row,
            name,
            partial(backward, inputs, gradients, deterministic),
            2.5 * shape.flops,
            repetitions,
        )
    best = 0.0
    for name, other in alternatives(inputs, path, flash).items():
        flops = shape.flops if name == "flex" else shape.unmasked_flops
        rate = measure(
            row,
            name,
            partial(autograd, inputs, other, gradients.d_o[..., : shape.values].contiguous()),
            2.5 * flops,
            repetitions,
        )
        best = max(best, rate)
    for name in ("oomb", "oomb_fused"):
        if best > 0 and f"{name}_tflops" in row:
            row[f"{name}_ratio"] = row[f"{name}_tflops"] / best
    return row


def main() -> None:
    assert __doc__ is not None
    parser = attention_problem.parser(__doc__)
    parser.add_argument("--only", choices=["forward", "backward"], help="one of the two passes")
    parser.add_argument("--bf16-pages", action="store_true", help="gradient pages in bf16")
    parser.add_argument("--plot", action="store_true", help="draw the results of the grids")
    options = parser.parse_args()
    if options.plot:
        from support.attention_plot import plot

        plot()
        return
    if options.json not in (None, Path("-")) and not options.only:
        parser.error("--json FILE is for one pass; give --only as well, or --json -")
    pages_dtype = torch.bfloat16 if options.bf16_pages else torch.float32
    how = (options.repetitions, options.path, not options.grid)
    benches: dict[str, Callable[[Shape], dict[str, Any]]] = {
        "forward": lambda shape: bench_forward(shape, *how),
        "backward": lambda shape: bench_backward(shape, *how, pages_dtype),
    }
    for kind, bench in benches.items():
        if options.only in (None, kind):
            attention_problem.run(kind, options, bench)


if __name__ == "__main__":
    main()
