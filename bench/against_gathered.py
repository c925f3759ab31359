"""Exact steps of one sequence on several GPUs: the engine's, and those of torch's own parts.

    torchrun --nproc-per-node 2 bench/against_gathered.py --tokens 64K 128K --json rows.json
    torchrun --nproc-per-node 2 bench/against_gathered.py --model tiny --device cpu --tokens 384

All run in one process group, on the same model and the same tokens, one after another. Context
parallelism in torch's own parts (bench/support/gathered_rival.py): each rank holds two blocks of
the sequence and gathers keys and values of each layer; inputs of layers lie in pinned host memory,
MLP and loss run in tiles, attention is cuDNN's. "gathered-kept" keeps attention's outputs on the
host too. All parameters are trained and no optimizer runs. Of each length the fastest step is told:
seconds of the slowest rank, and of the fullest the peak of GPU memory beyond what lay there before
the step (weights; pages and outputs of the engine count), and of pinned host memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from support.gathered_attention import KERNELS
from support.gathered_rival import Gathered
from support.record import write_record
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import oomb
from oomb.cli.bench_step import memory_since, random_tokens, start_of_memory
from oomb.lengths import parse_length
from oomb.parallel.job import is_first, of_ranks, ranks_of_job
from oomb.trace.shapes import SHAPES, ModelShape, random_model

GIB = 2**30
TINY = ModelShape("qwen2", 2, 64, 128, 4, 2, 16, 256)
WARM_UP = 4096  # tokens of the step that loads and tunes kernels; on a CPU fewer
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", nargs="+", default=["64K", "128K"])
    parser.add_argument("--chunk-size", type=int, default=8192, help="of the engine")
    parser.add_argument("--weights", choices=("whole", "zero3"), default="whole")
    parser.add_argument("--kernel", choices=KERNELS, default="cudnn", help="of the rival")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE") or "1") == 1:  # as `make bench` starts it
        print("a bench of several processes: torchrun --nproc-per-node 2 bench/against_gathered.py")
        return
    lengths = sorted(parse_length("--tokens", tokens) for tokens in given.tokens)
    shape = TINY if given.model == "tiny" else SHAPES[given.model]
    with ranks_of_job(given.device) as mesh:
        assert mesh is not None
        torch.manual_seed(0)
        model: Any = random_model(
            shape,
            device=given.device,
            dtype=torch.bfloat16 if given.device == "cuda" else torch.float32,
            positions=lengths[-1],
            layers=given.layers,
        )
        if given.weights == "zero3":
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh)
        rows: list[Row] = []
        for row in measured(model, shape, mesh, lengths, given):
            rows.append(row | ratio(row, rows))
            if is_first():
                tell(rows[-1])
                if given.json:
                    about = {"model": given.model, "gpus": mesh.size(), "weights": given.weights}
                    write_record(given.json, {**about, "kernel": given.kernel, "rows": rows})


def measured(
    model: Any, shape: ModelShape, mesh: DeviceMesh, lengths: list[int], given: argparse.Namespace
) -> Any:
    """Rows of the engine, then those of each rival."""
    on_gpu = given.device == "cuda"
    warm_up = min(WARM_UP if on_gpu else 64, lengths[0])
    shards = {} if given.weights == "whole" else {"sharded_weights": given.weights}
    config = oomb.Config(chunk_size=given.chunk_size, keep_outputs="all", **shards)

    def fastest(name: str, step: Any, length: int) -> Row:
        ids = random_tokens(shape, length, model.device)
        runs = [timed(model, lambda: step(ids), mesh) for _ in range(given.steps)]
        return {"name": name, "tokens": length, **min(runs, key=lambda run: run["seconds"])}

    with oomb.Engine(model, config, mesh=mesh) as engine:

        def ours(ids: torch.Tensor) -> Row:
            step = engine.forward_backward(ids, ids)
            stats = step.stats
            return {
                "loss": step.loss,
                "page_bytes": stats.device_peak_bytes,
                "host_bytes": stats.host_peak_bytes,
                "exchange_seconds": stats.exchange_seconds,
            }

        fastest("", ours, 2 * given.chunk_size + 1 if on_gpu else warm_up)
        for length in lengths:
            yield fastest("engine", ours, length)
    for keep in (False, True):
        kernel = given.kernel if on_gpu else "cpu"
        rival = Gathered(model, shape, mesh, keep=keep, kernel=kernel)
        for length in (warm_up, *lengths):
            emptied(model)
            host = rival.host_bytes(length)

            def theirs(ids: torch.Tensor, rival: Gathered = rival, host: int = host) -> Row:
                return {"loss": rival.step(ids), "page_bytes": 0, "host_bytes": host}

            with rival.prepared(length):
                row = fastest(rival.name, theirs, length)
            if length != warm_up:
                yield row


def timed(model: Any, step: Any, mesh: DeviceMesh) -> Row:
    """Of the slowest rank and the fullest."""
    emptied(model)
    device = model.device
    before = start_of_memory(device)
    dist.barrier()
    began = time.perf_counter()
    told = step()
    told["loss"] = float(told["loss"])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    told["seconds"] = time.perf_counter() - began
    told["gpu_bytes"] = told.pop("page_bytes") + memory_since(device, before).get(
        "torch_peak_bytes", 0
    )
    each = of_ranks(mesh, told)
    return {name: max(of_rank[name] for of_rank in each) for name in told}


def emptied(model: Any) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ratio(row: Row, rows: list[Row]) -> Row:
    """How many times as long as the engine, and as much GPU memory."""
    for ours in rows:
        if ours["name"] == "engine" and ours["tokens"] == row["tokens"]:
            memory = {"memory_to_ours": row["gpu_bytes"] / ours["gpu_bytes"]}
            return {"seconds_to_ours": row["seconds"] / ours["seconds"], **memory}
    return {}


def tell(row: Row) -> None:
    beside = "".join(f", {name} {row[name]:.3f}" for name in row if name.endswith("_to_ours"))
    print(
        f"{row['name']:14s} {row['tokens']:>9,} tokens: {row['seconds']:.2f} s, "
        f"{row['gpu_bytes'] / GIB:.1f} GiB a GPU, {row['host_bytes'] / GIB:.1f} on the host, "
        f"loss {row['loss']:.7f}{beside}",
        flush=True,
    )


if __name__ == "__main__":
    main()
