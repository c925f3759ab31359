"""One timed step of the engine, and what is told about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from oomb import Config, Engine, PageRule, TopKPages
from oomb.cli.bench_selection import SyntheticPages, UniformPages
from oomb.core.layout import Chunks
from oomb.core.tiers import reserved_ratio
from oomb.parallel.job import of_ranks
from oomb.plan.gpus import gpu_of_device
from oomb.results import Step
from oomb.trace.shapes import ModelShape

Row = dict[str, Any]

SELECTIONS: dict[str, type[SyntheticPages] | None] = {
    "model": None,
    "synthetic": SyntheticPages,
    "uniform": UniformPages,
}
FORMULA = (
    "FLOP = 6 * linear weights * tokens + 3 * attention forward; attention forward = 4 * query "
    "heads * head_dim * (query, key) pairs seen, per layer"
)
MFU = "MFU = FLOP / seconds / dense bf16 FLOP/s of the GPU's datasheet"


class StepBench:
    """Times steps of an engine on random tokens."""

    def __init__(
        self, engine: Engine, network: Any, shape: ModelShape, mesh: DeviceMesh | None = None
    ) -> None:
        self._engine, self._network, self._shape, self._mesh = engine, network, shape, mesh

    def run(self, length: int) -> Row:
        """Seconds, tokens/s, FLOP/s, memory, copies and distinct pages of one step; MFU on a GPU
        whose datasheet is known."""
        engine, network = self._engine, self._network
        ids = random_tokens(self._shape, length, network.device)
        prepare_lists(engine.config, self._shape.kv_heads, length, network.device)
        network.zero_grad(set_to_none=True)
        before = start_of_memory(network.device)
        began = time.perf_counter()
        result = engine.forward_backward(ids, ids)
        loss = float(result.loss)
        seconds = time.perf_counter() - began
        row = self._row(length, result, seconds) | {"loss": loss}
        row |= memory_since(network.device, before)
        return row | distinct_pages(result) | self._of_ranks(result, seconds)

    def _of_ranks(self, result: Step, seconds: float) -> Row:
        """Seconds of each rank, and those of them that it spent in exchanges."""
        if self._mesh is None:
            return {}
        each = of_ranks(self._mesh, (seconds, result.stats.exchange_seconds))
        return {
            "ranks": len(each),
            "seconds_by_rank": [a for a, _ in each],
            "exchange_seconds_by_rank": [b for _, b in each],
        }

    def _row(self, length: int, result: Step, seconds: float) -> Row:
        engine, shape = self._engine, self._shape
        layers = len(engine.layer_windows)
        pairs = length * (length + 1) / 2
        rule = engine.config.attention
        if isinstance(rule, PageRule):
            own = engine.config.chunk_size / 2
            pairs = min(pairs, length * (own + rule.max_pages * engine.config.page_size))
        linear = shape.linear_weights * layers / shape.layers
        flops = 6 * linear * length + 3 * 4 * shape.heads * shape.head_dim * pairs * layers
        row = {"tokens": length, "seconds": seconds, **vars(result.stats)} | {
            "tokens_per_second": length / seconds,
            "flops_per_second": flops / seconds,
        }
        device = self._network.device
        if device.type == "cuda":
            row["device_name"] = torch.cuda.get_device_name(device)
            gpu = gpu_of_device(row["device_name"])
            if gpu is not None:
                ranks = 1 if self._mesh is None else self._mesh.size()
                row["mfu"] = flops / seconds / gpu.flops / ranks
        return row


def random_tokens(shape: ModelShape, length: int, device: torch.device) -> torch.Tensor:
    """[1, length] int64, the same for everyone who is measured."""
    generator = torch.Generator(device).manual_seed(length)
    return torch.randint(shape.vocabulary, (1, length), generator=generator, device=device)


def start_of_memory(device: torch.device) -> int:
    """Bytes that torch holds on a GPU now; its peak counts from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def memory_since(device: torch.device, before: int) -> Row:
    """Torch's peak beyond ``before``, and all that the driver has given away; none on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return {
        "torch_peak_bytes": peak,
        "driver_used_bytes": total - free,
        "reserved_ratio": reserved_ratio(device),
    }


def with_selection(config: Config, selection: str, layers: int) -> Config:
    """Settings whose page rule, if there is one, draws its pages.

    Args:
        selection: a key of ``SELECTIONS``.
        layers: of the model.
    """
    kind, rule = SELECTIONS[selection], config.attention
    if kind is None or not isinstance(rule, TopKPages):
        return config
    blocks = config.chunk_size // config.page_size
    return replace(config, attention=kind(**vars(rule), layers=layers, blocks=blocks))


def prepare_lists(config: Config, kv_heads: int, length: int, device: torch.device) -> None:
    """Draw synthetic page lists before a step is timed."""
    rule = config.attention
    if isinstance(rule, SyntheticPages):
        heads = 1 if rule.share == "all_heads" else kv_heads
        last = Chunks(length - 1, config.chunk_size, config.page_size)  # the last token is no input
        rule.prepare(last.first_page(last.number - 1), heads, device)


def distinct_pages(step: Step) -> Row:
    """How many past pages the blocks of a chunk see together, per layer, where there was a choice.

    ``distinct_pages_by_chunk`` holds (chunk, mean over layers, largest of the layers). Needs
    ``Config(record_selection=True)``.
    """
    by_chunk: dict[int, list[int]] = {}
    for of_layer in step.selection:
        for chunk, lists in enumerate(of_layer):
            if lists is not None:
                by_chunk.setdefault(chunk, []).append(lists[lists >= 0].unique().numel())
    every = [count for counts in by_chunk.values() for count in counts]
    if not every:
        return {}
    return {
        "distinct_pages_mean": mean(every),
        "distinct_pages_max": max(every),
        "distinct_pages_by_chunk": [
            (chunk, mean(counts), max(counts)) for chunk, counts in by_chunk.items()
        ],
    }


def slopes(rows: list[Row]) -> dict[str, float]:
    """Growth of GPU memory from the shortest to the longest call, in MB per 10,000 tokens.

    Means something under a cap of the device tier that both calls fill. Of several steps of one
    length the last counts: the first also loads kernels.
    """
    by_length = {row["tokens"]: row for row in rows}
    first, last = by_length[min(by_length)], by_length[max(by_length)]
    tokens: int = last["tokens"] - first["tokens"]
    if tokens == 0 or "torch_peak_bytes" not in last:
        return {}

    def slope(*names: str) -> float:
        grown: int = sum(last[name] - first[name] for name in names)
        return grown / tokens * 1e4 / 1e6

    return {
        "allocators": slope("torch_peak_bytes", "device_peak_bytes"),
        "driver": slope("driver_used_bytes"),
    }


def timed_call(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device is done."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
