"""``oomb bench step --against``: ordinary training of the same model on the same tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from oomb.cli.bench_step import Row, memory_since, random_tokens, start_of_memory, timed_call
from oomb.cli.machine import format_bytes
from oomb.core.tiers import free_memory
from oomb.rivals.training import RIVALS, Rival
from oomb.trace.shapes import ModelShape

_HOST_SHARE = 0.9  # of free host memory


def measure_rivals(
    network: Any, shape: ModelShape, fastest: dict[int, Row], steps: int, warm_up: int
) -> Iterator[Row]:
    """Each rival at each length, shortest first; after one that fails none longer.

    Args:
        fastest: the engine's step of each length, for the ratios.
        steps: timed steps per length.
        warm_up: tokens of the step that loads and tunes kernels.
    """
    for kind in RIVALS:
        rival = kind(network, shape)
        why = ""
        _attempt(rival, network, shape, warm_up, 1)
        for length in sorted(fastest):
            measured: Row = {}
            why = why or _foreseen(rival, network, length)
            if not why:
                measured, why = _attempt(rival, network, shape, length, steps)
            row = {"name": rival.name, "tokens": length, "fits": not why, "why": why} | measured
            yield row | (_ratios(row, fastest[length]) if measured else {})


def _foreseen(rival: Rival, network: Any, length: int) -> str:
    """Why a step cannot fit; empty where it may."""
    device, host = network.device, torch.device("cpu")
    needs = [
        ("device", rival.least_device_bytes(length), free_memory(device)),
        ("host", rival.host_bytes(length), int(free_memory(host) * _HOST_SHARE)),
    ]
    for place, needed, free in needs:
        if needed > free:
            return (
                f"foreseen: needs at least {format_bytes(needed)} of {place} memory, "
                f"{format_bytes(free)} are free"
            )
    return ""


def _attempt(
    rival: Rival, network: Any, shape: ModelShape, length: int, steps: int
) -> tuple[Row, str]:
    """The fastest of some steps; or why there is none."""
    device = network.device
    ids = random_tokens(shape, length, device)
    runs: list[Row] = []
    try:
        with rival.prepared(length):
            for _ in range(steps):
                runs.append(_timed(rival, network, ids))
        why = ""
    except (torch.OutOfMemoryError, MemoryError) as error:
        why = f"tried: {str(error).splitlines()[0]}"
    network.zero_grad(set_to_none=True)
    if device.type == "cuda":
        gc.collect()  # what an error has left half done
        torch.cuda.empty_cache()
    if why:
        return {}, why
    best = min(runs, key=lambda run: run["seconds"])
    best |= {"tokens_per_second": length / best["seconds"], "host_bytes": rival.host_bytes(length)}
    return best, ""


def _timed(rival: Rival, network: Any, ids: torch.Tensor) -> Row:
    network.zero_grad(set_to_none=True)
    before = start_of_memory(network.device)
    losses: list[torch.Tensor] = []
    seconds = timed_call(lambda: losses.append(rival.step(ids)), network.device)
    row: Row = {"seconds": seconds, "loss": float(losses[0])}
    return row | memory_since(network.device, before)


def _ratios(row: Row, ours: Row) -> Row:
    """What the rival takes in units of what the engine takes: seconds; memory of GPU and host."""
    ratios = {"seconds_to_ours": row["seconds"] / ours["seconds"]}
    if "torch_peak_bytes" in row:
        ratios["memory_to_ours"] = memory_of(row) / memory_of(ours)
    return ratios


def fastest_steps(rows: list[Row]) -> dict[int, Row]:
    """The fastest of each length."""
    return {row["tokens"]: row for row in sorted(rows, key=lambda row: -row["seconds"])}


def memory_of(row: Row) -> int:
    """GPU and host memory of a step beyond the parameters."""
    names = ("torch_peak_bytes", "device_peak_bytes", "host_peak_bytes", "host_bytes")
    return sum(row.get(name, 0) for name in names)
