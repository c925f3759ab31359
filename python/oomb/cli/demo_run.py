"""The demo's three parts: gradients, memory and held-out loss, chunked and ordinary."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from oomb.cli.demo_gradients import GradientDifference
from oomb.cli.demo_memory import MemoryUse
from oomb.cli.demo_model import small_model
from oomb.cli.demo_picture import LeftOut, Measured, draw
from oomb.cli.demo_process import OnShare, OutOfBudget, run_task
from oomb.cli.demo_text import python_source
from oomb.cli.demo_training import TrainingRun, TrainingSize

MIB = 1 << 20
METHODS = {"ordinary": "ordinary", "checkpointing": "ordinary, checkpointing", "oomb": "OOMB"}


@dataclass(frozen=True)
class Size:
    """How much the demo does. ``lengths``: tokens of the memory runs."""

    chunk_size: int
    page_size: int
    gradient_tokens: int
    lengths: tuple[int, ...]
    budget: int
    training: TrainingSize


FULL = Size(
    chunk_size=512,
    page_size=128,
    gradient_tokens=2048,
    lengths=(4096, 8192, 16384, 32768, 65536),
    budget=1024 * MIB,
    training=TrainingSize(num_steps=40, num_tokens=2048, held_out_tokens=2048, evaluate_every=5),
)
QUICK = Size(
    chunk_size=128,
    page_size=64,
    gradient_tokens=512,
    lengths=(1024, 4096),
    budget=192 * MIB,
    training=TrainingSize(num_steps=6, num_tokens=512, held_out_tokens=512, evaluate_every=2),
)


def run(out: Path, seconds: float | None, size: Size) -> None:
    """Carry the demo out and leave picture, figures, model and text in ``out``.

    Args:
        seconds: lengths that would take longer are left out, and named; None: all are run.
    """
    console = Console()
    seconds = math.inf if seconds is None else seconds
    # The two training runs take about as long as everything before the last doubling.
    memory_ends = time.monotonic() + 0.8 * seconds
    parameters = sum(p.numel() for p in small_model().parameters())
    text = python_source()
    console.print(
        f"A Qwen2 of {parameters / 1e6:.1f} million parameters (bytes, random weights, fp32, CPU) "
        f"on the source of Python's library, {text.train.numel() / 1e6:.1f} MB.\n"
    )
    gradients = compare_gradients(console, size)
    show_gradients(console, size, gradients)
    memory, left_out = measure_memory(console, size, memory_ends)
    show_memory(console, size, memory, left_out)
    ordinary, chunked = train(console, size, out / "model")
    show_training(console, size.training, ordinary, chunked)
    text.save(out / "text")
    figures = _figures(size, gradients, memory, left_out, ordinary, chunked)
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No picture: pip install matplotlib")
    else:
        picture = out / "memory_and_loss.png"
        draw(picture, memory, left_out, size.budget, ordinary, chunked)
        _print_path(console, "Picture:", picture)
    _print_path(console, "Figures:", out / "figures.json")
    _print_path(console, "Model:  ", out / "model")
    _print_path(console, "Text:   ", out / "text")


def _print_path(console: Console, label: str, path: Path) -> None:
    console.print(f"{label} {path}", markup=False, highlight=False, soft_wrap=True)


# The three parts ----------------------------------------------------------------------------------


def compare_gradients(console: Console, size: Size) -> GradientDifference:
    with _progress(console, f"gradients at {size.gradient_tokens:,} tokens") as on_share:
        arguments = {"num_tokens": size.gradient_tokens, **_chunking(size)}
        return GradientDifference(**run_task("gradients", arguments, on_share))


def measure_memory(console: Console, size: Size, ends: float) -> tuple[Measured, LeftOut]:
    """Peak memory of each method at each length until it stops, and the lengths left out.

    A step of twice the length takes four times as long at most; where that would end after ``ends``
    (of the monotonic clock), the length is left out, unless it is ordinary training's.
    """
    memory: Measured = {method: {} for method in METHODS}
    left_out: LeftOut = {}
    for method in ("ordinary", "oomb", "checkpointing"):
        name, uses, left_for = METHODS[method], memory[method], 0.0
        for number, tokens in enumerate(size.lengths):
            if method != "ordinary" and time.monotonic() + left_for > ends:
                left_out[method] = list(size.lengths[number:])
                break
            began = time.monotonic()
            with _progress(console, f"memory at {tokens:,} tokens: {name}") as on_share:
                arguments = {"method": method, "num_tokens": tokens, "budget": size.budget}
                try:
                    use = MemoryUse(**run_task("memory", arguments | _chunking(size), on_share))
                except OutOfBudget:
                    uses[tokens] = None
                    break
            uses[tokens] = use
            left_for = time.monotonic() - began + 3 * use.seconds
    return memory, left_out


def train(console: Console, size: Size, save_to: Path) -> tuple[TrainingRun, TrainingRun]:
    """Ordinary and chunked run; the chunked one's model is saved."""
    runs = []
    for method, saved in (("ordinary", None), ("oomb", str(save_to))):
        with _progress(console, f"training: {METHODS[method]}") as on_share:
            arguments = {"method": method, "size": asdict(size.training), "save_to": saved}
            runs.append(TrainingRun(**run_task("training", arguments | _chunking(size), on_share)))
    return runs[0], runs[1]


def _chunking(size: Size) -> dict[str, Any]:
    return {"chunk_size": size.chunk_size, "page_size": size.page_size}


@contextmanager
def _progress(console: Console, what: str) -> Iterator[OnShare]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal
    if hidden:  # a log file shows at least what the minutes go to
        console.print(f"{what} …", highlight=False)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


# What they print ----------------------------------------------------------------------------------


def show_gradients(console: Console, size: Size, found: GradientDifference) -> None:
    chunks = -(-size.gradient_tokens // size.chunk_size)
    console.print(
        f"[bold]Gradients[/bold]  {size.gradient_tokens:,} tokens in {chunks} chunks: largest "
        "‖chunked - ordinary‖ / ‖ordinary‖ over the parameters"
    )
    console.print(f"  fp64  {found.float64:.1e}")
    console.print(
        f"  fp32  {found.float32:.1e}   (each against fp64: chunked {found.chunked_error:.1e}, "
        f"ordinary {found.ordinary_error:.1e})\n"
    )


def show_memory(console: Console, size: Size, memory: Measured, left_out: LeftOut) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    for name in (*METHODS.values(), "of which pages"):
        table.add_column(name, justify="right", min_width=14)
    for tokens in size.lengths:
        cells = [_cell(memory[method], left_out.get(method, []), tokens) for method in METHODS]
        use = memory["oomb"].get(tokens)
        table.add_row(f"{tokens:,}", *cells, _mib(use.pages) if use else "")
    console.print(
        f"[bold]Memory[/bold]  resident peak of one fp32 step in a fresh process, MiB beyond the "
        f"process with its model; each may take {size.budget // MIB:,} MiB"
    )
    console.print(table)
    for method, lengths in left_out.items():
        named = ", ".join(f"{tokens:,}" for tokens in lengths)
        console.print(
            f"Left out for want of time (--seconds): {METHODS[method]} at {named} tokens, so its "
            "line in the picture ends early."
        )
    held = [(tokens, use) for tokens, use in memory["oomb"].items() if use is not None]
    if len(held) > 1:
        (first, few), (last, many) = held[0], held[-1]
        console.print(
            f"OOMB without its pages: {_mib(few.peak - few.pages)} MiB at {first:,} tokens, "
            f"{_mib(many.peak - many.pages)} MiB at {last:,}.\n"
        )


def _cell(uses: dict[int, MemoryUse | None], left_out: list[int], tokens: int) -> str:
    if tokens not in uses:
        return "left out" if tokens in left_out else ""
    use = uses[tokens]
    return "stops" if use is None else _mib(use.peak)


def _mib(count: int) -> str:
    return f"{count / MIB:,.0f}"


def show_training(
    console: Console, size: TrainingSize, ordinary: TrainingRun, chunked: TrainingRun
) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("steps", "ordinary", "OOMB", "difference"):
        table.add_column(name, justify="right", min_width=9)
    for steps, a, b in zip(ordinary.steps, ordinary.losses, chunked.losses, strict=True):
        table.add_row(str(steps), f"{a:.5f}", f"{b:.5f}", f"{b - a:+.1e}")
    console.print(
        f"[bold]Held-out loss[/bold]  nats per byte, {size.held_out_tokens:,} bytes held out; "
        f"steps of {size.num_tokens:,} tokens, same data and seeds"
    )
    console.print(table)
    console.print()


def _figures(
    size: Size,
    gradients: GradientDifference,
    memory: Measured,
    left_out: LeftOut,
    ordinary: TrainingRun,
    chunked: TrainingRun,
) -> dict[str, Any]:
    uses = {
        method: {tokens: use and asdict(use) for tokens, use in of_method.items()}
        for method, of_method in memory.items()
    }
    return {
        "size": asdict(size),
        "gradients": asdict(gradients),
        "memory": uses,
        "left_out": left_out,
        "training": {"ordinary": asdict(ordinary), "oomb": asdict(chunked)},
    }
