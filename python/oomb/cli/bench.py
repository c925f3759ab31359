"""``oomb bench step``: what one training step costs, for model shapes by name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from oomb import AllChunks, Config, Dense, Engine, SampledChunks, TopKPages
from oomb.engine.layout import Chunks
from oomb.engine.results import Step
from oomb.engine.selection import Selector
from oomb.testing.selection import SyntheticSelector, UniformSelector
from oomb.testing.shapes import SHAPES, ModelShape, random_model

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

_SELECTORS = {"model": Selector, "synthetic": SyntheticSelector, "uniform": UniformSelector}
_PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200, by the vendor's datasheet


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
    out: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
) -> None:
    """Time one step per length on random weights and tokens, warm-up excluded."""
    if model not in SHAPES:
        raise typer.BadParameter(f"model: expected one of {', '.join(SHAPES)}, got {model!r}")
    if selection not in _SELECTORS:
        raise typer.BadParameter(f"selection: expected {', '.join(_SELECTORS)}, got {selection!r}")
    shape, lengths = SHAPES[model], [_length(text) for text in tokens.split(",")]
    config = Config(
        chunk_size=chunk_size,
        page_size=page_size,
        attention=Dense() if attention == "dense" else TopKPages(budget=budget),
        backward=AllChunks() if keep == 1 else SampledChunks(keep=keep),
        device_memory=device_memory or None,
        host_memory=host_memory or None,
        kv_grad_dtype=kv_grad_dtype,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = random_model(
        shape, device=device, dtype=dtype, positions=max(lengths), layers=layers or None
    )
    if optimizer not in ("none", "adamw"):
        raise typer.BadParameter(f"optimizer: expected none or adamw, got {optimizer!r}")
    update = _Update(network) if optimizer == "adamw" else None
    rows = []
    with Engine(network, config) as engine:
        engine._pools.selector_type = _SELECTORS[selection]
        _timed(engine, network, shape, 2 * chunk_size + 1)  # compile, load and tune kernels
        for length in lengths:
            for _ in range(steps):
                row = _timed(engine, network, shape, length)
                if update is not None:
                    row |= update.run()
                row |= {"model": model, "attention": attention, "selection": selection}
                row |= {"device_memory": device_memory, "kv_grad_dtype": kv_grad_dtype}
                rows.append(row)
                _print(rows[-1:])
                if out is not None:
                    _write(out, rows)
    _print(rows)
    typer.echo(_FORMULA)
    for counter, megabytes in _slopes(rows).items():
        typer.echo(f"GPU memory per further 10K tokens, {counter}: {megabytes:.2f} MB")


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


_FORMULA = (
    "MFU = (6 * linear weights * tokens + 3 * attention forward FLOP) / seconds / 989e12; "
    "attention forward = 4 * query heads * head_dim * (query, key) pairs seen, per layer"
)


def _timed(engine: Engine, network: Any, shape: ModelShape, length: int) -> dict[str, Any]:
    device = next(network.parameters()).device
    ids = torch.randint(shape.vocabulary, (1, length), device=device)
    _prepare_lists(engine, shape, length, device)
    network.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    result = engine.forward_backward(ids, ids)
    loss = float(result.loss)
    seconds = time.perf_counter() - began
    row = _row(engine, shape, length, result, seconds) | {"loss": loss}
    if device.type == "cuda":
        row["torch_peak_bytes"] = torch.cuda.max_memory_allocated() - before
        free, total = torch.cuda.mem_get_info()
        row["driver_used_bytes"] = total - free
    return row


def _prepare_lists(engine: Engine, shape: ModelShape, length: int, device: torch.device) -> None:
    kind, config = engine._pools.selector_type, engine.config
    if isinstance(config.attention, TopKPages) and issubclass(kind, SyntheticSelector):
        chunks = Chunks(length - 1, config.chunk_size, config.page_size)  # the last is no input
        layers = len(engine.layer_windows)
        kind.prepare(config.attention, chunks, layers, shape.kv_heads, device)


def _row(
    engine: Engine, shape: ModelShape, length: int, result: Step, seconds: float
) -> dict[str, Any]:
    layers = len(engine.layer_windows)
    pairs = length * (length + 1) / 2
    rule = engine.config.attention
    if isinstance(rule, TopKPages):
        own = engine.config.chunk_size / 2
        pairs = min(pairs, length * (own + rule.budget * engine.config.page_size))
    linear = shape.linear_weights * layers / shape.layers
    flops = 6 * linear * length + 3 * 4 * shape.heads * shape.head_dim * pairs * layers
    stats = vars(result.stats)
    return {"tokens": length, "seconds": seconds, **stats} | {
        "tokens_per_second": length / seconds,
        "mfu": flops / seconds / _PEAK_FLOPS,
    }


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    record = {"formula": _FORMULA, "mb_per_10k_tokens": _slopes(rows), "rows": rows}
    out.write_text(json.dumps(record, indent=1))


def _slopes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Growth of GPU memory from the shortest to the longest call, in MB per 10,000 tokens.

    Means something under a cap of the device tier that both calls fill.
    """
    first = min(rows, key=lambda row: row["tokens"])
    last = max(rows, key=lambda row: row["tokens"])
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


def _length(text: str) -> int:
    units = {"K": 1024, "M": 1024 * 1024}
    text = text.strip().upper()
    return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "tokens", "seconds", "fill", "sweep", "tok/s", "MFU", "device", "host", "H2D", "exposed"
    )
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['fill_seconds']:.2f}",
            f"{row['sweep_seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['mfu']:.3f}",
            f"{row['device_peak_bytes'] / 2**30:.2f} GiB",
            f"{row['host_peak_bytes'] / 2**30:.2f} GiB",
            f"{row['h2d_bytes'] / 2**30:.2f} GiB",
            f"{row['exposed_copy_seconds']:.2f} s",
        )
    Console(width=140).print(table)
