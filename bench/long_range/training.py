"""A stage of training: one length, one way to make gradients, for so many seconds."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

import oomb

from .data import Batch, Data
from .tasks import IGNORED

UNTRAINED = "untrained here"  # in place of a method: what the others begin from
_RISING = 0.1  # of a stage, at most


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage trains on, and how fast.

    Attributes:
        share: of a sequence that facts and questions take at most.
        others: of four sequences have another task than many needles.
        warm_up: steps in which the rate rises, or a tenth of the stage where that is less; Adam's
            moments begin anew with each stage.
        seconds: after which it ends, if ``steps`` have not come first; the rate falls to a tenth
            towards whichever end is nearer.
    """

    length: int
    batch: int
    rate: float
    share: float
    seconds: float
    steps: int = 10**9
    warm_up: int = 50
    others: int = 1


def engine_settings(length: int, page_size: int) -> dict[str, Any]:
    """Chunks of an eighth of a sequence, at most 4096 tokens."""
    return {"chunk_size": max(page_size, min(4096, length // 8)), "page_size": page_size}


def methods(length: int, page_size: int, seed: int) -> dict[str, oomb.Config | None]:
    """Ways to train by name; None: ordinary backward, or none."""
    common = engine_settings(length, page_size)
    changed: dict[str, dict[str, Any]] = {"exact": {}}
    scores: dict[str, dict[str, Any]] = {
        "": {},
        ", softmax": {"score": "token_softmax"},
        ", bounds": {"score": "token_softmax", "summary": "bounds"},
        ", sink, recent": {"sink_pages": 1, "recent_pages": 2},
        ", bounds, sink, recent": {
            "score": "token_softmax",
            "summary": "bounds",
            "sink_pages": 1,
            "recent_pages": 2,
        },
    }
    for budget in (16, 32, 64, 128, 256):
        for name, score in scores.items():
            rule = oomb.TopKPages(budget=budget, share="kv_head", **score)
            changed[f"{budget} pages{name}"] = {"attention": rule}
    for part in (2, 4):
        rule = oomb.SampledChunks(keep=1 / part, seed=seed, cap=2.0)
        changed[f"SpaCO 1/{part}"] = {"backward": rule}
    for window in (1, 2, 4):
        changed[f"{window} back"] = {"backward": oomb.TruncatedChunks(window=window)}
    changed["bf16 gradients"] = {"kv_grad_dtype": "bfloat16"}
    settings = {name: oomb.Config(**common, **own) for name, own in changed.items()}
    return {"ordinary": None, UNTRAINED: None, **settings}


@contextmanager
def autocast(model: Qwen2ForCausalLM) -> Iterator[None]:
    """bf16 products on a GPU; fp32 on a CPU."""
    if model.device.type == "cpu":
        yield
        return
    with torch.autocast("cuda", torch.bfloat16):
        yield


def train(
    model: Qwen2ForCausalLM,
    config: oomb.Config | None,
    stage: Stage,
    data: Data,
    *,
    on_step: Callable[[dict[str, float]], None] = lambda _: None,
) -> list[dict[str, float]]:
    """Trains in place. Returns a record per step: step, seconds, tokens, loss, bytes of pages.

    What ``on_step`` takes is no part of the seconds. The loss is that of the answers' tokens and,
    with little weight, of the text's.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    records: list[dict[str, float]] = []
    loaded = batches(data, stage, model.device)
    began = time.perf_counter()
    engine = contextlib.nullcontext() if config is None else oomb.Engine(model, config)
    with engine as open_engine:
        for number, batch in enumerate(loaded):
            spent = time.perf_counter() - began
            if spent >= stage.seconds and number > 0:
                break
            done = max(spent / stage.seconds, number / stage.steps)
            risen = max((number + 1) / stage.warm_up, done / _RISING)
            rate = stage.rate * min(risen, _falling(done))
            for group in optimizer.param_groups:
                group["lr"] = rate
            if open_engine is None:
                loss, pages = _ordinary(model, batch), 0
            else:
                step = _chunked(model, open_engine, batch)
                loss, pages = step.loss, step.stats.device_peak_bytes
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record = {
                "step": number + 1,
                "seconds": time.perf_counter() - began,
                "tokens": float(batch.input_ids.numel()),
                "loss": float(loss),
                "pages": float(pages),
            }
            records.append(record)
            paused = time.perf_counter()
            on_step(record)
            began += time.perf_counter() - paused
    model.eval()
    return records


class _Steps(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """The batches of a stage by their number."""

    def __init__(self, data: Data, stage: Stage) -> None:
        self._data, self._stage = data, stage

    def __len__(self) -> int:
        return self._stage.steps

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        stage = self._stage
        batch = self._data.training(number, stage.batch, stage.length, stage.share, stage.others)
        return tuple(vars(batch).values())


def batches(data: Data, stage: Stage, device: torch.device) -> Iterator[Batch]:
    """Those of a stage on the device; for a GPU other processes compose them ahead."""
    workers = max(1, min(8, (os.cpu_count() or 2) - 2)) if device.type == "cuda" else 0
    loader = torch.utils.data.DataLoader(_Steps(data, stage), batch_size=None, num_workers=workers)
    for columns in loader:
        yield Batch(*(column.to(device) for column in columns))


def _falling(done: float) -> float:
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _weights(batch: Batch) -> torch.Tensor:
    """Factors of the terms, with a sum of 1 per counted answer."""
    answers = (batch.labels[:, 1:] != IGNORED).sum().clamp(min=1)
    return batch.weights / answers


def _ordinary(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    with autocast(model):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    terms = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch.input_ids[:, 1:].flatten(), reduction="none"
    )
    loss = (terms * _weights(batch)[:, 1:].flatten()).sum()
    loss.backward()
    return loss.detach()


def _chunked(model: Qwen2ForCausalLM, engine: oomb.Engine, batch: Batch) -> oomb.Step:
    with autocast(model):
        return engine.forward_backward(
            batch.input_ids,
            batch.input_ids,
            loss_weights=_weights(batch),
            num_items_in_batch=1,
        )
