r"""Seconds of a step too long to run whole: a model of one layer, one of two, and what follows.

    python bench/extrapolated_step.py --tokens 1M --kv-grad-dtype bfloat16 --keep-outputs 0.3333
    torchrun --nproc-per-node 2 bench/extrapolated_step.py --tokens 1M --chunk-size 8192 \
        --kv-grad-dtype bfloat16 --keep-outputs 0.3333

Both are timed after a short call that loads kernels. What the second layer adds is taken for every
further one. Its pages and outputs stay on the GPU, so the sum lacks transfers that a whole model's
step could not hide.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from support.record import write_record

import oomb
from oomb.lengths import parse_length
from oomb.parallel.job import is_first, ranks_of_job
from oomb.trace.shapes import SHAPES, random_model

_CHOSEN = ("chunk_size", "kv_grad_dtype", "main_grad_dtype", "recompute", "keep_outputs")


def step_seconds(
    name: str, layers: int, tokens: int, config: oomb.Config, mesh: Any
) -> dict[str, Any]:
    """One step of some layers of a named shape with random bf16 weights."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = random_model(
        SHAPES[name], device="cuda", dtype=torch.bfloat16, positions=tokens, layers=layers
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).cuda()
    with oomb.Engine(model, config, mesh=mesh) as engine:
        short = ids[:, : 4 * config.chunk_size]
        engine.forward_backward(short, short)
        torch.cuda.synchronize()
        began = time.perf_counter()
        stats = engine.forward_backward(ids, ids).stats
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return {
        "layers": layers,
        "seconds": seconds,
        "kept": stats.kept_output_share,
        "recomputed": stats.recomputed,
        "fill_seconds": stats.fill_seconds,
        "sweep_seconds": stats.sweep_seconds,
        "exchange_seconds": stats.exchange_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--tokens", default="1M")
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--kv-grad-dtype", default="float32")
    parser.add_argument("--main-grad-dtype", default="float32")
    parser.add_argument("--recompute", default="auto")
    parser.add_argument("--keep-outputs", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    tokens = parse_length("--tokens", given.tokens)
    config = oomb.Config(
        chunk_size=given.chunk_size,
        kv_grad_dtype=given.kv_grad_dtype,
        main_grad_dtype=given.main_grad_dtype,
        recompute=given.recompute,
        keep_outputs=given.keep_outputs,
    )
    rows = []
    with ranks_of_job("cuda") as mesh:
        for layers in (1, 2):
            rows.append(step_seconds(given.model, layers, tokens, config, mesh))
            if is_first():
                print(rows[-1], flush=True)
        first, ranks = is_first(), 1 if mesh is None else mesh.size()
    if not first:
        return
    layers = SHAPES[given.model].layers
    one, two = (row["seconds"] for row in rows)
    whole = one + (layers - 1) * (two - one)
    print(f"{layers} layers: {whole:.0f} s")
    if given.json is not None:
        record = {"tokens": tokens, "gpus": ranks, "rows": rows, "layers": layers, "seconds": whole}
        record["config"] = {name: getattr(config, name) for name in _CHOSEN}
        write_record(given.json, record)


if __name__ == "__main__":
    main()
