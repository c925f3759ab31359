"""``oomb bench step``: what one training step costs, for model shapes by name."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from oomb import AllChunks, Config, Dense, Engine, SampledChunks, TopKPages
from oomb.cli.bench_picture import draw
from oomb.cli.bench_rivals import fastest_steps, measure_rivals, memory_of
from oomb.cli.bench_step import FORMULA, SELECTORS, Row, StepBench, slopes
from oomb.cli.bench_tables import print_rivals, print_steps
from oomb.cli.machine import format_bytes
from oomb.engine.plan import Plan
from oomb.lengths import parse_length
from oomb.testing.shapes import SHAPES, random_model

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Measure this machine."""


@app.command()
def step(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen2.5-7b",
    tokens: Annotated[str, typer.Option(help="Lengths, such as 64K,128K.")] = "64K",
    attention: Annotated[str, typer.Option(help="dense or topk.")] = "dense",
    budget: Annotated[int, typer.Option(help="Pages per query block with topk.")] = 64,
    selection: Annotated[str, typer.Option(help="model, synthetic or uniform.")] = "model",
    keep: Annotated[float, typer.Option(help="Share of chunks swept (SpaCO); 1: all.")] = 1.0,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 128,
    device_memory: Annotated[str, typer.Option(help="Cap of the device tier; '' for none.")] = "",
    host_memory: Annotated[str, typer.Option(help="Cap of the host tier; '' for none.")] = "",
    kv_grad_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    recompute: Annotated[str, typer.Option(help="auto, none or layer.")] = "auto",
    layers: Annotated[int, typer.Option(help="Build fewer layers; 0: all.")] = 0,
    optimizer: Annotated[
        str, typer.Option(help="none or adamw: a step of it after each.")
    ] = "none",
    steps: Annotated[int, typer.Option(help="Timed steps per length, after one to warm up.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    against: Annotated[
        bool, typer.Option(help="Also time ordinary training, plain and tuned, where it fits.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Save a picture of seconds and memory here.")
    ] = None,
) -> None:
    """Time one step per length on random weights and tokens, warm-up excluded."""
    if model not in SHAPES:
        raise typer.BadParameter(f"model: expected one of {', '.join(SHAPES)}, got {model!r}")
    if selection not in SELECTORS:
        raise typer.BadParameter(f"selection: expected {', '.join(SELECTORS)}, got {selection!r}")
    if attention not in ("dense", "topk"):
        raise typer.BadParameter(f"attention: expected dense or topk, got {attention!r}")
    if optimizer not in ("none", "adamw"):
        raise typer.BadParameter(f"optimizer: expected none or adamw, got {optimizer!r}")
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"device: expected cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "device: expected a GPU for cuda, got none (see oomb doctor); on a CPU: --device cpu "
            "--model qwen2.5-0.5b --layers 2 --tokens 4K --chunk-size 1024"
        )
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("plot: expected matplotlib; pip install 'oomb[plot]'")
    shape, lengths = SHAPES[model], _lengths(tokens)
    try:
        config = Config(
            chunk_size=chunk_size,
            page_size=page_size,
            attention=Dense() if attention == "dense" else TopKPages(budget=budget),
            backward=AllChunks() if keep == 1 else SampledChunks(keep=keep),
            device_memory=device_memory or None,
            host_memory=host_memory or None,
            kv_grad_dtype=kv_grad_dtype,  # type: ignore[arg-type]
            recompute=recompute,  # type: ignore[arg-type]
            record_selection=attention == "topk",
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = random_model(
        shape, device=device, dtype=dtype, positions=max(lengths), layers=layers or None
    )
    update = _Update(network) if optimizer == "adamw" else None
    rows: list[Row] = []
    rivals: list[Row] = []
    plans: dict[int, Plan] = {}
    about = {"model": model, "attention": attention, "selection": selection}
    about |= {"device_memory": device_memory, "kv_grad_dtype": kv_grad_dtype}
    warm_up = 2 * chunk_size + 1

    def write() -> None:
        if out is not None:
            out.write_text(json.dumps(_record(rows, rivals, plans), indent=1))

    with Engine(network, config) as engine:
        bench = StepBench(engine, network, shape, selection)
        bench.run(warm_up)  # compile, load and tune kernels
        for length in lengths:
            if against:
                plans[length] = engine.plan(length)
            for _ in range(steps):
                row = bench.run(length) | about
                if update is not None:
                    row |= update.run()
                rows.append(row)
                print_steps(rows[-1:])
                write()
    if len(rows) > 1:
        print_steps(rows)
    typer.echo(FORMULA)
    for counter, megabytes in slopes(rows).items():
        typer.echo(f"GPU memory per further 10K tokens, {counter}: {megabytes:.2f} MB")
    if against:
        del bench, engine
        fastest = fastest_steps(rows)
        for row in measure_rivals(network, shape, fastest, steps, warm_up):
            rivals.append(row)
            write()
        print_rivals(rivals, fastest)
        if attention == "topk":
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
    record: dict[str, Any] = {"formula": FORMULA, "mb_per_10k_tokens": slopes(rows), "rows": rows}
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


def _lengths(text: str) -> list[int]:
    try:
        return [parse_length("tokens", part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
