"""``oomb bench step``: what one training step costs, for model shapes by name."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from oomb.cli.kept import KEEP_HELP, share_or_word
from oomb.cli.refusal import check_out, refuse
from oomb.config import AllChunks, Config, Dense, SampledChunks, TopKPages
from oomb.lengths import parse_length
from oomb.trace.shapes import SHAPES

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
    main_grad_dtype: Annotated[
        str, typer.Option(help="Of the gradient sums: float32 or bfloat16.")
    ] = "float32",
    recompute: Annotated[str, typer.Option(help="auto, none, pointwise or layer.")] = "auto",
    keep_outputs: Annotated[str, typer.Option(help=KEEP_HELP)] = "auto",
    divide_pages: Annotated[
        bool, typer.Option("--divide-pages", help="GPUs divide pages in place of copies of heads.")
    ] = False,
    head_groups: Annotated[
        int, typer.Option(min=1, help="Groups in which GPUs exchange a layer's heads.")
    ] = 1,
    deterministic: Annotated[
        bool, typer.Option(help="Sums in a fixed order; without it sparse steps are faster.")
    ] = True,
    layers: Annotated[int, typer.Option(min=0, help="Build fewer layers; 0: all.")] = 0,
    optimizer: Annotated[
        str, typer.Option(help="none or adamw: a step of it after each.")
    ] = "none",
    steps: Annotated[
        int, typer.Option(min=1, help="Timed steps per length, after one to warm up.")
    ] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    against: Annotated[
        bool,
        typer.Option(
            help="Also time ordinary training where it fits: plain, tuned, and tuned-kept, which "
            "keeps attention's outputs on the host."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Save a picture of seconds and memory here.")
    ] = None,
) -> None:
    """Time one step per length on random weights and tokens, warm-up excluded."""
    if model not in SHAPES:
        raise typer.BadParameter(f"model: expected one of {', '.join(SHAPES)}, got {model!r}")
    if attention not in ("dense", "topk"):
        raise typer.BadParameter(f"attention: expected dense or topk, got {attention!r}")
    if optimizer not in ("none", "adamw"):
        raise typer.BadParameter(f"optimizer: expected none or adamw, got {optimizer!r}")
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"device: expected cuda or cpu, got {device!r}")
    if plot is not None:
        _check_picture(plot)
    if against and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise typer.BadParameter("--against: expected one process, got a job of several ranks")
    lengths = _lengths(tokens)
    try:
        config = Config(
            chunk_size=chunk_size,
            page_size=page_size,
            attention=Dense() if attention == "dense" else TopKPages(budget=budget),
            backward=AllChunks() if keep == 1 else SampledChunks(keep=keep),
            device_memory=device_memory or None,
            host_memory=host_memory or None,
            kv_grad_dtype=kv_grad_dtype,  # type: ignore[arg-type]
            main_grad_dtype=main_grad_dtype,  # type: ignore[arg-type]
            recompute=recompute,  # type: ignore[arg-type]
            keep_outputs=share_or_word(keep_outputs),  # type: ignore[arg-type]
            record_selection=attention == "topk",
            divide_pages=divide_pages,
            head_groups=head_groups,
            deterministic=deterministic,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    check_out("bench step", "--out", out)
    check_out("bench step", "--plot", plot)
    import torch

    from oomb.cli.bench_run import run
    from oomb.cli.bench_step import SELECTIONS
    from oomb.errors import Error

    if selection not in SELECTIONS:
        raise typer.BadParameter(f"selection: expected {', '.join(SELECTIONS)}, got {selection!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "device: expected a GPU for cuda, got none (see oomb doctor); on a CPU: --device cpu "
            "--model qwen2.5-0.5b --layers 2 --tokens 4K --chunk-size 1024"
        )
    try:
        run(
            model,
            lengths,
            config,
            selection=selection,
            layers=layers or None,
            optimizer=optimizer,
            steps=steps,
            device=device,
            against=against,
            about={
                "model": model,
                "attention": attention,
                "selection": selection,
                "chunk_size": chunk_size,
                "page_size": page_size,
                "recompute": recompute,
                "device_memory": device_memory,
                "kv_grad_dtype": kv_grad_dtype,
                "main_grad_dtype": main_grad_dtype,
                "keep_outputs": keep_outputs,
                "divide_pages": divide_pages,
                "head_groups": head_groups,
                "deterministic": deterministic,
            },
            out=out,
            plot=plot,
        )
    except (Error, torch.OutOfMemoryError) as error:
        refuse("bench step", str(error).partition("\n")[0], code=1)


def _check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before the work for it."""
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("plot: expected matplotlib; pip install 'oomb[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase  # slow, and not always there

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = path.suffix[1:].lower()
    if suffix and suffix not in kinds:
        raise typer.BadParameter(f"plot: expected a name in one of {', '.join(kinds)}, got {path}")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [parse_length("tokens", part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if min(lengths) < 2:
        raise typer.BadParameter("tokens: expected at least 2, one of them to predict, got 1")
    return lengths
