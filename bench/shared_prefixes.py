"""A policy step of several completions on one long prompt: as a tree, and row by row.

    python bench/shared_prefixes.py --prompt 100K --completion 4K    # Qwen2.5-7B with LoRA
    python bench/shared_prefixes.py --model qwen2.5-0.5b --layers 2 --cpu --prompt 500 \\
        --completion 40 --chunk-size 128

Weights are random. The loss is GRPO's: clipped ratios with an advantage for each completion, whose
terms are those of rows, so a row can be a call of its own. Rows are alike in size: ``--rows`` of
them are timed one by one, and their median counts once for each completion. Before that a short
step of both kinds that is not counted. Prints seconds, peak memory and the ratio.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from support.record import write_record

import oomb
from oomb.lengths import parse_length
from oomb.trace.shapes import SHAPES, random_model

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--prompt", default="100K", help="tokens")
    parser.add_argument("--completion", default="4K", help="tokens of each")
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--trees", type=int, default=1, help="timed steps as a tree")
    parser.add_argument("--rows", type=int, default=2, help="timed rows")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prompt = parse_length("--prompt", given.prompt)
    completion = parse_length("--completion", given.completion)
    tokens = prompt + completion
    device = "cpu" if given.cpu else "cuda"
    dtype = torch.float32 if given.cpu else torch.bfloat16
    shape = SHAPES[given.model]
    model = random_model(shape, device=device, dtype=dtype, positions=tokens, layers=given.layers)
    adapted: Any = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    group = Group(model.config.vocab_size, prompt, completion, given.completions, device)
    few = Group(model.config.vocab_size, min(prompt, 4096), min(completion, 512), 2, device)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "model": given.model,
        "prompt": prompt,
        "completion": completion,
        "completions": given.completions,
    }
    with oomb.Engine(adapted, oomb.Config(chunk_size=given.chunk_size)) as engine:
        for _ in range(2):
            few.tree(engine)
            few.row(engine, 0)
        adapted.zero_grad()
        found["tree"] = measured([lambda: group.tree(engine)] * given.trees, device)
        print("tree", json.dumps(found["tree"]), flush=True)
        steps = [lambda row=row: group.row(engine, row) for row in range(given.rows)]
        found["row"] = measured(steps, device)
        print("row", json.dumps(found["row"]), flush=True)
    of_rows = given.completions * found["row"]["seconds"]
    found["rows_one_by_one_seconds"] = of_rows
    found["ratio"] = of_rows / found["tree"]["seconds"]
    print(f"{given.completions} rows one by one: {of_rows:.1f} s")
    print(f"rows one by one over the tree: {found['ratio']:.2f}")
    if given.json is not None:
        write_record(given.json, found)


class Group:
    """Completions of one prompt."""

    def __init__(
        self, vocabulary: int, prompt: int, completion: int, number: int, device: str
    ) -> None:
        random = torch.Generator(device).manual_seed(0)
        ids = torch.randint(
            vocabulary, (number, prompt + completion), generator=random, device=device
        )
        ids[:, :prompt] = ids[0, :prompt]
        self._ids, self._labels = ids, ids.clone()
        self._labels[:, :prompt] = -100
        self._advantages = torch.linspace(-1, 1, number, device=device)
        self._completion = completion

    def tree(self, engine: oomb.Engine) -> oomb.Stats:
        return self._step(engine, slice(None), share_prefixes=True)

    def row(self, engine: oomb.Engine, row: int) -> oomb.Stats:
        return self._step(engine, slice(row, row + 1))

    def _step(self, engine: oomb.Engine, rows: slice, **arguments: Any) -> oomb.Stats:
        with engine.two_pass(self._ids[rows], self._labels[rows], **arguments) as call:
            logprobs = call.logprobs[:, -self._completion :]
            ratio = (logprobs - logprobs.detach()).exp()
            advantages = self._advantages[rows, None]
            terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-terms.sum() / self._labels.shape[0] / self._completion).backward()
            return call.sweep()


def measured(steps: list[Callable[[], oomb.Stats]], device: str) -> dict[str, Any]:
    """Median seconds of steps, and memory of the largest."""
    seconds, pages, fill, peak = [], [], [], []
    for step in steps:
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        stats = step()
        if device == "cuda":
            torch.cuda.synchronize()
            peak.append((torch.cuda.max_memory_allocated() + stats.device_peak_bytes) / GIB)
        seconds.append(time.perf_counter() - began)
        fill.append(stats.fill_seconds)
        pages.append((stats.device_peak_bytes + stats.host_peak_bytes) / GIB)
    found = {
        "seconds": median(seconds),
        "all_seconds": seconds,
        "fill_seconds": median(fill),
        "pages_gib": max(pages),
    }
    return found | ({"peak_gib": max(peak)} if peak else {})


if __name__ == "__main__":
    main()
