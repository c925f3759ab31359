"""A preference pair in two passes, beside the plain step on the same rows.

    python bench/two_pass.py --tokens 32K                       # Qwen2.5-7B with LoRA
    python bench/two_pass.py --model qwen2.5-0.5b --tokens 300 --cpu --layers 2 --chunk-size 128

Weights are random. Two rows of ``--tokens``; the second half of each is the answer. The reference
is the model without its adapter, an evaluation. Prints seconds and peak memory of each part, after
a step of both kinds that is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid

import oomb
from oomb.lengths import parse_length
from oomb.trace.shapes import SHAPES, random_model

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--tokens", default="32K", help="of each row")
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--entropies", action="store_true", help="with a bonus of entropy")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    tokens = parse_length("--tokens", given.tokens)
    device = "cpu" if given.cpu else "cuda"
    dtype = torch.float32 if given.cpu else torch.bfloat16
    shape = SHAPES[given.model]
    model = random_model(shape, device=device, dtype=dtype, positions=tokens, layers=given.layers)
    adapted: Any = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (2, tokens), device=device)
    labels = ids.clone()
    labels[:, : tokens // 2] = -100
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    found |= {"tokens": tokens, "model": given.model, "entropies": given.entropies}
    with oomb.Engine(adapted, oomb.Config(chunk_size=given.chunk_size)) as engine:
        steps = Steps(engine, adapted, ids, labels, given.entropies)
        few = min(tokens, 2048)
        short = Steps(engine, adapted, ids[:, :few], ids[:, :few], given.entropies)
        for name in ("plain", "reference", "pair"):
            getattr(short, name)()
            adapted.zero_grad()
        for name in ("plain", "reference", "pair"):
            found[name] = measured(getattr(steps, name), device)
            adapted.zero_grad()
            print(name, json.dumps(found[name]), flush=True)
    if device == "cuda":
        ratio = found["pair"]["peak_gib"] / found["plain"]["peak_gib"]
        print(f"peak of the pair over that of the plain step: {ratio:.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


class Steps:
    """What is measured, on the same rows."""

    def __init__(
        self,
        engine: oomb.Engine,
        adapted: Any,
        ids: torch.Tensor,
        labels: torch.Tensor,
        entropies: bool,
    ) -> None:
        self._engine, self._adapted, self._entropies = engine, adapted, entropies
        self._ids, self._labels = ids, labels
        self._of_reference = torch.zeros(2, device=ids.device)

    def plain(self) -> oomb.Stats:
        return self._engine.forward_backward(self._ids, self._labels).stats

    def reference(self) -> oomb.Stats:
        with self._adapted.disable_adapter():
            step = self._engine.evaluate(self._ids, self._labels, return_logprobs=True)
        assert step.logprobs is not None
        self._of_reference = step.logprobs.sum(1)
        return step.stats

    def pair(self) -> oomb.Stats:
        with self._engine.two_pass(self._ids, self._labels, entropies=self._entropies) as call:
            chosen, rejected = call.logprobs.sum(1) - self._of_reference
            loss = -logsigmoid(0.1 * (chosen - rejected))
            if self._entropies:
                loss = loss - 0.01 * call.entropies.mean()
            loss.backward()
            return call.sweep()


def measured(step: Callable[[], oomb.Stats], device: str) -> dict[str, float]:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    stats = step()
    if device == "cuda":
        torch.cuda.synchronize()
    found = {
        "seconds": time.perf_counter() - began,
        "fill_seconds": stats.fill_seconds,
        "sweep_seconds": stats.sweep_seconds,
        "pages_gib": (stats.device_peak_bytes + stats.host_peak_bytes) / GIB,
    }
    if device == "cuda":  # pages are not torch's
        peak = torch.cuda.max_memory_allocated() + stats.device_peak_bytes
        found["peak_gib"] = peak / GIB
    return found


if __name__ == "__main__":
    main()
