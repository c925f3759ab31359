"""A short real run through the engine, told to an observer as a trainer would."""

from __future__ import annotations

import time
from typing import Any

import torch

import oomb
from engine.models import make
from engine.reference import random_ids
from oomb.monitor import RunObserver

CHUNK, PAGE, TOKENS = 16, 8, 92
SPARSE = oomb.Config(
    chunk_size=CHUNK,
    page_size=PAGE,
    attention=oomb.TopKPages(budget=2),
    record_selection=True,
    device_memory=30_000,
    host_memory=10_000_000,
)


def run(
    observer: RunObserver, steps: int = 3, config: oomb.Config = SPARSE, calls: int = 1
) -> list[oomb.Step]:
    """Train for ``steps`` steps of ``calls`` calls each; the engine's results."""
    model = make("llama", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = random_ids(1, TOKENS)
    info: dict[str, Any] = {"model": "tiny", "context": TOKENS, "config": config}
    observer.on_start({**info, "max_steps": steps})
    results = []
    with oomb.Engine(model, config) as engine:
        for step in range(1, steps + 1):
            began = time.perf_counter()
            for _ in range(calls):
                result = engine.forward_backward(
                    ids, ids, on_progress=lambda p, step=step: observer.on_progress(step, p)
                )
                results.append(result)
            optimizer.step()
            optimizer.zero_grad()
            observer.on_selection(step, result.selection)
            seconds = time.perf_counter() - began
            record = {"step": step, "tokens": TOKENS, "loss": result.loss, "seconds": seconds}
            record |= {"tokens_per_second": TOKENS / seconds, **vars(result.stats)}
            observer.on_step(record)
        observer.on_eval({"step": steps, "loss": engine.evaluate(ids, ids).loss})
    observer.on_end({"reason": "done", "seconds": 1.0})
    return results
