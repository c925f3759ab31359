"""Peak memory of one training step, under a limit on the memory of its process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from oomb.cli.demo_model import ordinary_loss, small_model
from oomb.cli.demo_text import python_source
from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.results import Progress

Method = Literal["ordinary", "checkpointing", "oomb"]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one step.

    Attributes:
        peak: resident bytes beyond those of the process with its model, before the step.
        pages: bytes of the page pool within the peak.
        process: resident bytes at the peak, all told.
    """

    peak: int
    pages: int
    process: int
    seconds: float


def task(
    *,
    on_share: Callable[[float], None],
    method: Method,
    num_tokens: int,
    chunk_size: int,
    page_size: int,
    budget: int,
) -> dict[str, Any]:
    """For :mod:`oomb.cli.demo_process`.

    Args:
        budget: bytes that the step may take beyond what the process has before it.
    """
    model = small_model()
    input_ids = python_source().batch(0, num_tokens)
    pages, before = 0, _status("VmRSS")
    _limit_memory(budget)
    began = time.perf_counter()
    if method == "oomb":
        config = Config(chunk_size=chunk_size, page_size=page_size, recompute="none")
        pages = _chunked_step(model, input_ids, config, on_share)
    else:
        if method == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        ordinary_loss(model, input_ids).backward()
    seconds, peak = time.perf_counter() - began, _status("VmHWM")
    return asdict(MemoryUse(peak - before, pages, peak, seconds))


def _chunked_step(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: Config,
    on_share: Callable[[float], None],
) -> int:
    """Returns the bytes of pages at their peak."""

    def report(progress: Progress) -> None:
        share = progress.tokens_done / input_ids.numel()
        on_share(0.25 * share if progress.phase == "fill" else 0.25 + 0.75 * share)

    with Engine(model, config) as engine:
        stats = engine.forward_backward(input_ids, input_ids, on_progress=report).stats
    return stats.device_peak_bytes + stats.host_peak_bytes


def _limit_memory(budget: int) -> None:
    """Let the writable memory of this process grow by ``budget``; then allocations fail."""
    limit = _status("VmData") + budget
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _status(field: str) -> int:
    """Bytes of a field of this process's status: VmRSS, its peak VmHWM, VmData."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status tells no {field}; the demo needs Linux, and to read it")
