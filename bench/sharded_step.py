"""Exact steps of a model whose weights, sums and optimizer states are shards of several GPUs.

    torchrun --nproc-per-node 2 bench/sharded_step.py --chunk-size 16384 --json step.json
    torchrun --nproc-per-node 2 bench/sharded_step.py --weights zero3 --main-grad-device host
    torchrun --nproc-per-node 2 bench/sharded_step.py --layers 12 --tokens 16K --save folder
    torchrun --nproc-per-node 2 bench/sharded_step.py --model tiny --device cpu --tokens 300

All parameters are trained with AdamW, whose states have the weights' dtype, bf16 on a GPU. Weights
are random and made as shards. Told are seconds of each step and of the optimizer, MFU over all
GPUs, torch's peak and the seconds in exchanges of this rank; with ``--save`` those of a checkpoint:
weights gathered and written by rank 0, rows of the optimizer by all, and all read back.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.checkpoint import CheckpointStore
from oomb.hf.optimizer_files import OptimizerFiles
from oomb.lengths import parse_length
from oomb.parallel.job import Job
from oomb.parallel.whole import gathered

_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    "qwen2.5-14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip
_H200 = 989e12  # dense bf16 FLOP/s of the datasheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=_SIZES, default="qwen2.5-14b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=0, help="build fewer; 0: all")
    parser.add_argument("--tokens", default="128K")
    parser.add_argument("--chunk-size", type=int, default=None, help="default: oomb.Config's")
    parser.add_argument("--weights", choices=("zero1", "zero2", "zero3"), default="zero3")
    parser.add_argument("--main-grad-device", choices=("device", "host"), default="device")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a new folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.tokens = parse_length("--tokens", options.tokens)
    if "RANK" not in os.environ:  # as `make bench` starts it
        print("a bench of several processes: torchrun --nproc-per-node 2 bench/sharded_step.py")
        return
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if on_gpu else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    sizes = dict(_SIZES[options.model])
    sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
    config = Qwen2Config(**sizes, max_position_embeddings=options.tokens, tie_word_embeddings=False)
    model = made(config, mesh, torch.bfloat16 if on_gpu else torch.float32)
    settings: dict[str, Any] = {"main_grad_device": options.main_grad_device}
    if options.chunk_size is not None:
        settings["chunk_size"] = options.chunk_size
    engine_config = oomb.Config(sharded_weights=options.weights, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=on_gpu)
    rows = measured(model, optimizer, engine_config, mesh, options)
    saved = {} if options.save is None else checkpoint(model, optimizer, options.save)
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        if saved:
            print(saved)
        if options.json:
            about = {"model": options.model, "layers": sizes["num_hidden_layers"]}
            record = {**about, "gpus": mesh.size(), "rows": rows, "checkpoint": saved}
            write_record(options.json, record)
    dist.destroy_process_group()


def made(config: Qwen2Config, mesh: DeviceMesh, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Never whole on a GPU."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device=mesh.device_type)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(mesh.device_type)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard: torch.Tensor = parameter.to_local()  # type: ignore[operator]
            if "norm" in name:
                shard.fill_(1.0)
            elif name.endswith("bias"):
                shard.zero_()
            else:
                shard.normal_(0, 0.02)
    return model


def measured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: oomb.Config,
    mesh: DeviceMesh,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    on_gpu = options.device == "cuda"
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(1, vocabulary, (1, options.tokens), generator=generator)
    ids = ids.to(options.device)
    rows = []
    with oomb.Engine(model, config, mesh=mesh) as engine:
        for _ in range(options.steps):
            began = now(on_gpu)
            step = engine.forward_backward(ids, ids)
            swept = now(on_gpu)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            stats = step.stats
            rows.append({
                "tokens": options.tokens, "chunk_size": config.chunk_size,
                "weights": options.weights, "sums": options.main_grad_device,
                "seconds": swept - began, "optimizer_seconds": now(on_gpu) - swept,
                "mfu": flops(model, options.tokens) / (swept - began) / mesh.size() / _H200,
                "loss": float(step.loss), "fill_seconds": stats.fill_seconds,
                "sweep_seconds": stats.sweep_seconds, "exchange_seconds": stats.exchange_seconds,
                "gathered_weight_bytes": stats.gathered_weight_bytes,
                "scattered_sum_bytes": stats.scattered_sum_bytes,
                "kept_output_share": stats.kept_output_share,
                "torch_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            })  # fmt: skip
    return rows


def checkpoint(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, float]:
    """Seconds of one, in the parts that a Trainer's has."""
    job = Job()
    files, store = OptimizerFiles(optimizer, model, job), CheckpointStore(folder)
    seconds, began = {}, time.perf_counter()

    def done(name: str) -> None:
        nonlocal began
        job.together(lambda: None)
        now = time.perf_counter()
        seconds[name], began = now - began, now

    whole = gathered(model.state_dict(), keep=job.is_first)
    done("gather_seconds")

    def write(place: Path) -> None:
        job.by_first(lambda: model.save_pretrained(place, state_dict=whole))
        done("weights_seconds")
        files.save(place)
        done("optimizer_seconds")

    place = store.save(1, write, by_first=job.by_first)
    done("hashed_seconds")
    optimizer.load_state_dict(files.load(place, copy=False))
    done("load_optimizer_seconds")
    sizes = (file.stat().st_size for file in place.rglob("*.safetensors"))
    job.close()
    return {**seconds, "bytes": float(sum(sizes))}


def flops(model: nn.Module, tokens: int) -> float:
    """Of a step without anything computed twice."""
    c = model.config
    linear = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    attention = 4 * c.hidden_size * c.num_hidden_layers * tokens**2 / 2
    return 6 * linear * tokens + 3 * attention


def now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
