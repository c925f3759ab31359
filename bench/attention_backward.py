"""The attention backward beside the alternatives, in one process: TFLOP/s and ratios.

    python bench/attention_backward.py              # Qwen2.5-7B heads, dense and 64 pages
    python bench/attention_backward.py --grid       # the shapes of bench/attention.py --grid
    python bench/attention_backward.py --json result.json

Counted as 2.5 times the forward of bench/attention.py, which says how. "oomb" is the default,
deterministic; "oomb_fused" is deterministic=False. Gradient pages are fp32 unless --bf16-pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attention import HEADLINE, Inputs, Shape, flex, grid, matmul_tflops, median_ms, ours, sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend

from oomb import _C


class Gradients:
    """d_o, and where our backward puts what it finds."""

    def __init__(self, inputs: Inputs, pages_dtype: torch.dtype) -> None:
        s = inputs.shape
        self.d_o = torch.randn_like(inputs.q)
        self.dq = torch.empty_like(inputs.q)
        self.dk, self.dv = torch.empty_like(inputs.k), torch.empty_like(inputs.v)
        self.delta = torch.empty_like(inputs.lse)
        units = 2 * max(s.pages, 1)
        tile = (s.kv_heads, s.page_size, s.head_dim)
        self.pool = torch.zeros(units, *tile, device="cuda", dtype=pages_dtype)
        table = torch.randperm(units, device="cuda").to(torch.int32)
        self.table = table.view(1, -1, 2).contiguous()
        self.workspace: Tensor | None = None

    def room(self, size: int) -> Tensor:
        if self.workspace is None or self.workspace.numel() < size:
            self.workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        return self.workspace


def ours_backward(
    inputs: Inputs, gradients: Gradients, deterministic: bool
) -> Callable[[], object]:
    arguments = inputs.past_arguments()
    g = gradients

    def call() -> None:
        _C.attention_backward(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            o=inputs.o,
            d_o=g.d_o,
            lse=inputs.lse,
            dq=g.dq,
            dk=g.dk,
            dv=g.dv,
            delta=g.delta,
            dkv_pool=g.pool.data_ptr(),
            dkv_unit_bytes=g.pool[0].numel() * g.pool.element_size(),
            dkv_table=g.table if inputs.shape.pages else None,
            dkv_dtype="float32" if g.pool.dtype == torch.float32 else "bfloat16",
            deterministic=deterministic,
            workspace=g.room,
            **arguments,
        )

    return call


def autograd(inputs: Inputs, forward: Callable[[], object], d_o: Tensor) -> Callable[[], object]:
    leaves = [inputs.q, inputs.all_k, inputs.all_v]
    for leaf in leaves:
        leaf.requires_grad_()
    o = forward()
    assert isinstance(o, Tensor)

    def call() -> object:
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    return call


def bench_backward(shape: Shape, repetitions: int, pages_dtype: torch.dtype) -> dict[str, object]:
    inputs = Inputs(shape)
    gradients = Gradients(inputs, pages_dtype)
    ours(inputs)()  # o and lse
    row: dict[str, object] = {
        "pass": "backward",
        **dataclasses.asdict(shape),
        "pages_dtype": str(pages_dtype).removeprefix("torch."),
    }
    others: dict[str, Callable[[], object]]
    if inputs.selection is None:
        others = {
            "cudnn": sdpa(inputs, SDPBackend.CUDNN_ATTENTION),
            "flash2": sdpa(inputs, SDPBackend.FLASH_ATTENTION),
        }
    else:
        others = {"flex": flex(inputs)}
    best = 0.0
    for name in ["oomb", "oomb_fused", *others]:
        try:
            if name in others:
                call = autograd(inputs, others[name], gradients.d_o)
            else:
                call = ours_backward(inputs, gradients, deterministic=name == "oomb")
            milliseconds = median_ms(call, repetitions)
        except RuntimeError as error:
            row[f"{name}_error"] = str(error)[:200]
            continue
        flops = shape.unmasked_flops if name in ("cudnn", "flash2") else shape.flops
        rate = 2.5 * flops / milliseconds / 1e9
        row[f"{name}_ms"] = milliseconds
        row[f"{name}_tflops"] = rate
        if name in others:
            best = max(best, rate)
    for name in ("oomb", "oomb_fused"):
        rate = row.get(f"{name}_tflops")
        if best > 0 and isinstance(rate, float):
            row[f"{name}_ratio"] = rate / best
    return row


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", action="store_true", help="the full grid of shapes")
    parser.add_argument("--bf16-pages", action="store_true", help="gradient pages in bf16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()

    torch.manual_seed(0)
    ceiling = matmul_tflops(options.repetitions)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, matrix product {ceiling:.0f} TFLOP/s")
    rows = []
    for shape in grid() if options.grid else HEADLINE:
        pages_dtype = torch.bfloat16 if options.bf16_pages else torch.float32
        row = bench_backward(shape, options.repetitions, pages_dtype)
        rows.append(row)
        figures = "  ".join(
            f"{key} {value:.2f}" if key.endswith("_ratio") else f"{key[:-7]} {value:.0f}"
            for key, value in row.items()
            if key.endswith(("_tflops", "_ratio")) and isinstance(value, float)
        )
        print(f"backward {shape}: {figures}", flush=True)
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
