r"""Seconds, MFU and memory of one step of a published model's shape, beside what oomb plan says.

    python bench/published_models.py --model qwen3.5-9b --tokens 256K             # full
    python bench/published_models.py --model gemma-3-12b --tokens 256K --lora 16
    python bench/published_models.py --model qwen3.5-9b --tokens 1M --budget 64 \
        --kv-grad-dtype bfloat16 --device-memory 60GiB --host-memory 100GiB
    python bench/published_models.py --model qwen3.5-9b --tokens 1M --layers 8    # of the 32

Random bf16 weights. MFU counts 6 FLOP per token and weight of a matrix product (4 where the weight
is frozen; of experts those that a token is sent to) and three times attention's forward over the
pairs that are seen, in heads as kernels get them; recurrences are not counted. Page lists are
drawn, as in ``oomb bench step --selection synthetic``. The first step, on a first, a middle and a
last chunk, loads and tunes kernels. The plan is that of this GPU, or of an H200.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.published import published
from support.record import write_record
from torch import nn

import oomb
from oomb.cli.bench_step import prepare_lists, with_selection
from oomb.lengths import parse_length
from oomb.plan import Machine, Planner
from oomb.plan.gpus import gpu_of_device

GIB = 2**30


def linear_flops(model: nn.Module, settings: Any) -> int:
    """Of a token, forward and backward."""
    chosen = getattr(settings, "num_experts_per_tok", 0)
    total = 0
    head = model.get_output_embeddings().weight  # also where it is the embedding
    for name, weight in model.named_parameters():
        is_product = weight.dim() >= 2 and "embed" not in name and "conv" not in name
        if not is_product and weight is not head:
            continue
        active = weight.numel()
        if weight.dim() == 3:  # experts
            active = active * chosen // weight.shape[0]
        total += active * (6 if weight.requires_grad else 4)
    return total


def seen_pairs(tokens: int, window: int, most: float) -> float:
    """(query, key) pairs of a layer: all before, in a window, or at most so many keys a query."""
    if window:
        return tokens * min(window, tokens) - min(window, tokens) ** 2 / 2
    return min(tokens * (tokens + 1) / 2, tokens * most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="qwen3.5-9b", help="of docs/models.md")
    parser.add_argument("--tokens", default="256K")
    parser.add_argument("--layers", type=int, default=0, help="build fewer; 0: all")
    parser.add_argument("--lora", type=int, default=0, help="rank, on all linear layers; 0: full")
    parser.add_argument("--budget", type=int, default=0, help="pages (TopKPages); 0: exact")
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--kv-grad-dtype", default="float32")
    parser.add_argument("--main-grad-dtype", default="float32")
    parser.add_argument("--keep-outputs", choices=("auto", "none", "all"), default="auto")
    parser.add_argument("--steps", type=int, default=1, help="the last is quoted")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    tokens = parse_length("tokens", options.tokens)
    of_name = published(
        options.model,
        tokens=tokens,
        layers=options.layers,
        lora=options.lora,
        device=options.device,
    )
    model, settings = of_name.model, of_name.config
    config = oomb.Config(
        chunk_size=options.chunk_size,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        kv_grad_dtype=options.kv_grad_dtype,
        main_grad_dtype=options.main_grad_dtype,
        keep_outputs=options.keep_outputs,
    )
    known = gpu_of_device(torch.cuda.get_device_name()) if options.device == "cuda" else None
    machine = Machine.described(gpu=known.name if known else "h200")
    planner = Planner(settings, machine, dtype=torch.bfloat16, adapter=of_name.adapter)
    shapes = planner.shapes
    if options.budget:
        config = replace(config, attention=oomb.TopKPages(budget=options.budget))
        config = with_selection(config, "synthetic", len(shapes))
        kv_heads = max(shape.kv_heads for shape in shapes if not shape.window)
        prepare_lists(config, kv_heads, tokens, torch.device(options.device))
    most = options.chunk_size / 2 + options.budget * config.page_size if options.budget else tokens
    attention = sum(
        3 * 4 * shape.query_heads * shape.head_dim * seen_pairs(tokens, shape.window, most)
        for shape in shapes
    )
    linear = linear_flops(model, settings)
    plan = planner.predict(tokens, config, optimizer=None)
    on_gpu = options.device == "cuda"
    seconds = []
    with oomb.Engine(model, config) as engine:
        for length in [3 * options.chunk_size, *[tokens] * options.steps]:
            ids = torch.randint(1, 30000, (1, length), device=options.device)
            model.zero_grad(set_to_none=True)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            step = engine.forward_backward(ids, ids)
            loss = float(step.loss)
            seconds.append(time.perf_counter() - began)
            print(f"{length} tokens: {seconds[-1]:.1f} s, loss {loss:.3f}", flush=True)
    flops = linear * tokens + attention
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    gpu = gpu_of_device(name)
    record = {
        "model": options.model,
        "layers": options.layers or settings.num_hidden_layers,
        "tokens": tokens,
        "trained": f"LoRA r={options.lora}" if options.lora else "full",
        "budget": options.budget,
        "device": name,
        "loss": loss,
        "seconds": seconds[-1],
        "all_seconds": seconds[1:],
        "fill_seconds": step.stats.fill_seconds,
        "sweep_seconds": step.stats.sweep_seconds,
        "mfu": None if gpu is None else flops / seconds[-1] / gpu.flops,
        "linear_flops": linear * tokens,
        "attention_flops": attention,
        "head_dims": sorted({shape.head_dim for shape in shapes}),
        "kept_output_share": step.stats.kept_output_share,
        "torch_peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "pages_peak_gib": step.stats.device_peak_bytes / GIB,
        "host_peak_gib": step.stats.host_peak_bytes / GIB,
        "planned": {
            "fits": plan.fits,
            "seconds": plan.seconds,
            "torch_and_pages_gib": plan.device_bytes / GIB,
        },
    }
    print(json.dumps(record), flush=True)
    if options.json:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
