"""The measurement of ``oomb bench step``: the engine's steps, rivals', and what is told of both."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import typer

from oomb.cli.bench_picture import draw
from oomb.cli.bench_rivals import fastest_steps, measure_rivals, memory_of
from oomb.cli.bench_step import FORMULA, MFU, Row, StepBench, slopes, with_selection
from oomb.cli.bench_tables import print_rivals, print_step, print_steps
from oomb.cli.machine import format_bytes
from oomb.config import Config, PageRule
from oomb.engine.engine import Engine
from oomb.engine.plan import Plan
from oomb.parallel.job import is_first, ranks_of_job
from oomb.trace.shapes import SHAPES, random_model


def run(
    model: str,
    lengths: list[int],
    config: Config,
    *,
    selection: str,
    layers: int | None,
    optimizer: str,
    steps: int,
    device: str,
    against: bool,
    about: dict[str, str | int],
    out: Path | None,
    plot: Path | None,
) -> None:
    """Time ``steps`` steps of a shape at each length, print them and write the files asked for.

    Args:
        selection: a key of ``SELECTIONS``.
        layers: build fewer layers; None: all.
        optimizer: ``"none"`` or ``"adamw"``.
        against: also time ordinary training.
        about: added to every row.
    """
    shape = SHAPES[model]
    config = with_selection(config, selection, shape.layers if layers is None else layers)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows: list[Row] = []
    rivals: list[Row] = []
    plans: dict[int, Plan] = {}
    warm_up = 2 * config.chunk_size + 1

    def write() -> None:
        if out is not None and is_first():
            out.write_text(json.dumps(_record(rows, rivals, plans), indent=1))

    with ranks_of_job(device) as mesh:
        network = random_model(
            shape, device=device, dtype=dtype, positions=max(lengths), layers=layers
        )
        update = _Update(network) if optimizer == "adamw" else None
        with Engine(network, config, mesh=mesh) as engine:
            bench = StepBench(engine, network, shape, mesh)
            bench.run(warm_up)  # compile, load and tune kernels
            for length in lengths:
                if against:
                    plans[length] = engine.plan(length)
                for _ in range(steps):
                    row = bench.run(length) | about
                    if update is not None:
                        row |= update.run()
                    rows.append(row)
                    if len(lengths) * steps > 1 and is_first():
                        print_step(row)
                    write()
    if not is_first():
        return
    print_steps(rows)
    typer.echo(FORMULA)
    if any("mfu" in row for row in rows):
        typer.echo(MFU)
    for counter, megabytes in slopes(rows).items():
        typer.echo(f"GPU memory per further 10K tokens, {counter}: {megabytes:.2f} MB")
    if against:
        del bench, engine
        fastest = fastest_steps(rows)
        for row in measure_rivals(network, shape, fastest, steps, warm_up):
            rivals.append(row)
            write()
        print_rivals(rivals, fastest)
        if isinstance(config.attention, PageRule):
            typer.echo("ordinary training attends to all tokens, ours to the chosen pages")
        for line in _thriftier(fastest, rivals, plans):
            typer.echo(line)
    if plot is not None:
        draw(plot, rows, rivals, model)


class _Update:
    """An optimizer with all defaults, as a training run has it."""

    def __init__(self, network: torch.nn.Module) -> None:
        self._optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def run(self) -> dict[str, float]:
        began = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"optimizer_seconds": time.perf_counter() - began}


def _record(rows: list[Row], rivals: list[Row], plans: dict[int, Plan]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "formula": f"{FORMULA}. {MFU}",
        "mb_per_10k_tokens": slopes(rows),
        "rows": rows,
    }
    if plans:
        record["plans"] = {str(length): vars(plan) for length, plan in plans.items()}
        record["rivals"] = rivals
    return record


def _thriftier(ours: dict[int, Row], rivals: list[Row], plans: dict[int, Plan]) -> list[str]:
    """A line for each length at which a rival needs less memory, with what the plan said."""
    lines = []
    for rival in rivals:
        length = rival["tokens"]
        if "torch_peak_bytes" not in rival or memory_of(rival) >= memory_of(ours[length]):
            continue
        said = [text for text in plans[length].advice if "ordinary training" in text]
        lines.append(
            f"{rival['name']} needs less memory at {length:,} tokens: "
            f"{format_bytes(memory_of(rival))} on GPU and host, ours "
            f"{format_bytes(memory_of(ours[length]))}; engine.plan: {said[0] if said else 'silent'}"
        )
    return lines
