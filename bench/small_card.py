r"""A step under a cap of GPU memory: what it takes, beside what oomb plan says.

    python bench/small_card.py --model llama-3.1-8b --tokens 65536 --cap 24
    python bench/small_card.py --model qwen2.5-7b --full --main-grad-dtype bfloat16 --cap 0
    python bench/small_card.py --model qwen2.5-7b --full --optimizer adamw --optimizer-states host \
        --cap 80 --tokens 131072 --device-memory 12GiB --chunk-size 4096
    python bench/small_card.py --model qwen2.5-32b --weights host --chunk-size 8192 --tokens 65536

Random weights of a named shape. Without --full the linear layers are in NF4 (bitsandbytes, double
quantisation) under LoRA on all of them; with --weights host they are in bf16, and the engine moves
them to the host before the cap is set. The cap is torch's per-process fraction; the bytes measured
are the driver's, so that they include page pools, context and kernels.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from support.four_bits import in_four_bits
from support.record import write_record

import oomb
from oomb.optim import HostStates
from oomb.plan import UNIFORM, Machine, Planner
from oomb.plan.gpus import gpu_of_device
from oomb.trace.shapes import SHAPES, random_model
from oomb.train.float8 import with_float8

GIB = 2**30


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--cap", type=float, default=24, help="GiB; 0: none")
    parser.add_argument("--device-memory", default="4GiB")
    parser.add_argument("--chunk-size", type=int, default=2048)
    parser.add_argument("--weights", choices=("device", "host"), default="device")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--main-grad-dtype", default="float32")
    parser.add_argument("--main-grad-device", choices=("device", "host"), default="device")
    parser.add_argument("--optimizer", choices=("none", "adamw", "adamw_8bit"), default="none")
    parser.add_argument("--optimizer-states", choices=("device", "host"), default="device")
    parser.add_argument("--budget", type=int, default=0, help="pages (TopKPages); 0: exact")
    parser.add_argument("--kv-grad-dtype", default="float32")
    parser.add_argument("--keep-outputs", choices=("auto", "none", "all"), default="auto")
    parser.add_argument("--float8", metavar="RECIPE", help="of torchao; with --full")
    parser.add_argument("--steps", type=int, default=2, help="the last is quoted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    before = used_bytes()
    on_host = options.weights == "host"
    positions = max(2**18, options.tokens)
    model: Any = random_model(
        SHAPES[options.model], device="cuda", dtype=torch.bfloat16, positions=positions
    )
    adapter: Any = None
    if not options.full:
        from peft import LoraConfig, get_peft_model  # optional

        adapter = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        if not on_host:
            in_four_bits(model)
        model = get_peft_model(model, adapter)
    model.train()
    config = oomb.Config(
        chunk_size=options.chunk_size,
        device_memory=options.device_memory,
        main_grad_dtype=options.main_grad_dtype,
        main_grad_device=options.main_grad_device,
        kv_grad_dtype=options.kv_grad_dtype,
        keep_outputs=options.keep_outputs,
        attention=oomb.TopKPages(budget=options.budget) if options.budget else oomb.Dense(),
        weights=options.weights,
    )
    gpu = gpu_of_device(torch.cuda.get_device_name())
    machine = Machine.described(
        gpu=gpu.name if gpu else "h200",
        device_memory=int(options.cap * GIB) or None,
        host_memory="120GiB",
    )
    planner = Planner(
        options.model,
        machine,
        dtype=torch.bfloat16,
        adapter=adapter,
        quantization=None if options.full or on_host else "nf4",
    )
    names = {"none": None, "adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
    plan = planner.predict(
        options.tokens,
        config,
        optimizer=names[options.optimizer],
        optimizer_states=options.optimizer_states,
        choices=UNIFORM,  # random weights prefer no page
    )
    if options.float8:
        with_float8(model, options.float8, torch.device("cuda"))
    optimizer: Any = None
    if options.optimizer != "none":
        trained = [p for p in model.parameters() if p.requires_grad]
        if options.optimizer == "adamw":
            optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        else:
            from bitsandbytes.optim import AdamW8bit  # optional

            optimizer = AdamW8bit(trained, lr=1e-6)
        if options.optimizer_states == "host":
            optimizer = HostStates(optimizer, free_gradients=True)
    ids = torch.randint(1, 30000, (1, options.tokens), device="cuda")
    peak = 0

    def watch(_: object) -> None:
        nonlocal peak
        peak = max(peak, used_bytes())

    with oomb.Engine(model, config) as engine:
        torch.cuda.empty_cache()
        if options.cap:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
        peak = used_bytes()
        torch.cuda.reset_peak_memory_stats()
        all_seconds = []
        for _ in range(options.steps):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step = engine.forward_backward(ids, ids, on_progress=watch)
            torch.cuda.synchronize()
            all_seconds.append(time.perf_counter() - begin)
            print(f"step of {all_seconds[-1]:.1f} s", flush=True)
            stepping = 0.0
            if optimizer is not None:
                begin = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                stepping = time.perf_counter() - begin
                watch(None)
    base = "nf4" if not on_host else "bf16 on the host"
    record = {
        "model": options.model,
        "tokens": options.tokens,
        "base": "bf16, full" if options.full else f"{base}, LoRA r={options.rank}",
        "cap_gib": options.cap,
        "main_grad_dtype": options.main_grad_dtype,
        "device": torch.cuda.get_device_name(),
        "loss": float(step.loss),
        "seconds": all_seconds[-1],
        "all_seconds": all_seconds,
        "first_seconds": all_seconds[0],  # with the host's pinned memory
        "optimizer_seconds": stepping,
        "main_grad_device": options.main_grad_device,
        "optimizer": options.optimizer,
        "optimizer_states": options.optimizer_states,
        "float8": options.float8,
        "budget": options.budget,
        "driver_peak_gib": (peak - before) / GIB,
        "torch_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "torch_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"],  # at the cap
        "pages_peak_gib": step.stats.device_peak_bytes / GIB,
        "host_pages_peak_gib": step.stats.host_peak_bytes / GIB,
        "growth_seconds": step.stats.exposed_growth_seconds,  # waited for new host memory
        "fetched_weights_gib": step.stats.fetched_weight_bytes / GIB,
        "weights_waited_seconds": step.stats.exposed_weight_seconds,
        "copies_waited_seconds": step.stats.exposed_copy_seconds,
        "planned": {
            "fits": plan.fits,
            "seconds": plan.seconds,
            "first_seconds": (plan.seconds or 0.0) + (plan.growth_seconds or 0.0),
            "torch_and_pages_gib": plan.device_bytes / GIB,
            "optimizer_seconds": plan.optimizer_seconds,
            "sums_wait_seconds": plan.duration.sums if plan.duration else None,
            "weights_wait_seconds": plan.duration.weights if plan.duration else None,
            "parameters_gib": plan.parameter_bytes / GIB,
            "pages_gib": plan.device_pool_bytes / GIB,
            "host_pages_gib": plan.host_pool_bytes / GIB,
            "call_gib": plan.call_bytes / GIB,
            "sums_gib": plan.sum_bytes / GIB,
        },
    }
    print(record)
    if options.json is not None:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
