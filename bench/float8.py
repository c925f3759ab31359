"""Steps with linear layers in float8 beside bf16, in one process, and how far gradients are off.

    python bench/float8.py --tokens 64K --chunk-sizes 4096 8192 16384 --json float8.json
    python bench/float8.py --tokens 64K --layers 4 --kinds bf16 rowwise_with_gw_hp rowwise
    python bench/float8.py --products

All weights of a shape of ``oomb plan`` train, with page-sparse attention; each kind begins with the
same ones. Before that, gradients of 4,096 tokens in two layers of the shape are compared with
fp32's. With ``--products`` single casts and products are timed instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.record import write_record

import oomb
from oomb.lengths import parse_length
from oomb.model.float8 import columns_in_float8, rows_in_float8, scaled_product
from oomb.trace.shapes import SHAPES, random_model
from oomb.train.float8 import with_float8

GPU = torch.device("cuda")
ERROR_TOKENS = 4096


def made(name: str, layers: int, positions: int) -> Any:
    """In bf16, always of the same weights."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "layers": layers or None}
    return random_model(SHAPES[name], device="cuda", positions=positions, **settings)


def convert(model: Any, kind: str) -> None:
    if kind != "bf16":
        with_float8(model, kind, GPU)


def step_seconds(model: Any, config: oomb.Config, ids: torch.Tensor, steps: int) -> list[float]:
    found = []
    with oomb.Engine(model, config) as engine:
        for _ in range(steps + 1):  # the first one compiles and pins memory
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.forward_backward(ids, ids)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - begin)
    return found[1:]


def gradient_errors(name: str, kinds: list[str]) -> dict[str, dict[str, float]]:
    """Relative errors of linear layers' gradients against fp32: the mean and the largest."""
    ids = torch.randint(30000, (1, ERROR_TOKENS), device=GPU)

    def gradients(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = made(name, 2, ERROR_TOKENS)
        if dtype == torch.float32:
            model.float()  # of the same, rounded weights; angles of rotation stay in fp32 in both
        convert(model, kind)
        with oomb.Engine(model, oomb.Config(chunk_size=1024, keep_main_grad=True)) as engine:
            engine.forward_backward(ids, ids)
            return {
                key: engine.main_grad(parameter).float().cpu()
                for key, parameter in model.named_parameters()
                if "proj.weight" in key
            }

    exact = gradients("bf16", torch.float32)
    errors = {}
    for kind in kinds:
        found = gradients(kind, torch.bfloat16)
        away = [float((found[k] - x).norm() / x.norm()) for k, x in exact.items()]
        errors[kind] = {"mean": sum(away) / len(away), "largest": max(away)}
    return errors


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def products(rows: int) -> list[dict[str, Any]]:
    """Casts and products of Qwen2.5-7B's layers, with TFLOP/s and GB/s."""
    found = []
    for inputs, outputs in ((3584, 3584), (3584, 18944), (18944, 3584)):
        x = torch.randn(rows, inputs, device=GPU, dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device=GPU, dtype=torch.bfloat16)
        cast, weight, turned = rows_in_float8(x), rows_in_float8(w), columns_in_float8(w)
        y = torch.randn(rows, outputs, device=GPU, dtype=torch.bfloat16)
        cast_y = rows_in_float8(y)
        work: dict[str, Callable[[], object]] = {"bf16": partial(matmul, x, w)}
        for fast in (True, False):
            of = ", fast" if fast else ""
            kinds = (*cast, *weight), (*cast_y, *turned)
            for kind, factors in zip(("y", "dx"), kinds, strict=True):
                work[f"{kind}{of}"] = partial(scaled_product, *factors, None, x.dtype, fast)
        row: dict[str, Any] = {"rows": rows, "inputs": inputs, "outputs": outputs}
        for name, run in work.items():
            row[f"{name}, TFLOP/s"] = 2e-9 * rows * inputs * outputs / milliseconds(run)
        row["cast of x, GB/s"] = 3e-6 * x.numel() / milliseconds(partial(rows_in_float8, x))
        row["cast of w, GB/s"] = 3e-6 * w.numel() / milliseconds(partial(rows_in_float8, w))
        row["turned w, GB/s"] = 5e-6 * w.numel() / milliseconds(partial(columns_in_float8, w))
        print({k: round(v, 1) for k, v in row.items()}, flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b", help="a shape of oomb plan")
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--tokens", default="64K")
    parser.add_argument("--budget", type=int, default=64, help="pages; 0: exact")
    parser.add_argument("--device-memory", default="9GiB")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[16384])
    parser.add_argument("--kinds", nargs="+", default=["bf16", "rowwise_with_gw_hp"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    record: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    if options.products:
        record["products"] = [row for rows in (4096, 16384) for row in products(rows)]
    else:
        if not options.no_errors:
            record["gradient_errors"] = gradient_errors(options.model, options.kinds)
            print(record["gradient_errors"], flush=True)
        length = parse_length("tokens", options.tokens)
        ids = torch.randint(30000, (1, length), device=GPU)
        rule = oomb.TopKPages(budget=options.budget) if options.budget else oomb.Dense()
        record |= {"model": options.model, "layers": options.layers, "tokens": length, "rows": []}
        for kind in options.kinds:
            model = made(options.model, options.layers, length)
            convert(model, kind)
            for chunk_size in options.chunk_sizes:
                config = oomb.Config(
                    chunk_size=chunk_size,
                    attention=rule,
                    device_memory=options.device_memory,
                    main_grad_dtype="bfloat16",
                    kv_grad_dtype="bfloat16",
                )
                seconds = step_seconds(model, config, ids, options.steps)
                row = {"kind": kind, "chunk_size": chunk_size, "seconds": median(seconds)}
                print(row, seconds, flush=True)
                record["rows"].append(row | {"all_seconds": seconds})
            del model
            torch.cuda.empty_cache()
        best = {
            kind: min(row["seconds"] for row in record["rows"] if row["kind"] == kind)
            for kind in options.kinds
        }
        record["times_as_fast"] = {kind: best["bf16"] / best[kind] for kind in best}
        print(record["times_as_fast"])
    if options.json is not None:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
