"""``oomb plan``: what training a model at a context takes, and the settings to do it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console

from oomb.cli.kept import KEEP_HELP, share_or_word
from oomb.cli.plan_tables import show
from oomb.cli.refusal import check_out, refuse
from oomb.config import (
    AllChunks,
    BackwardRule,
    Config,
    Dense,
    SampledChunks,
    TopKPages,
    TruncatedChunks,
)
from oomb.lengths import parse_length
from oomb.nearest import nearest
from oomb.plan.gpus import GPUS, gpu_of_figures
from oomb.plan.optimizers import OPTIMIZERS
from oomb.trace.shapes import SHAPES
from oomb.units import parse_size

_LEAST_MEMORY = 2**20
_DTYPES = ("bfloat16", "float32", "float16")
_SHARDED = get_args(get_type_hints(Config)["sharded_weights"])


def plan(
    model: Annotated[
        str,
        typer.Argument(help=f"Folder, hub name, one of {', '.join(SHAPES)}, or of docs/models.md."),
    ],
    context: Annotated[str, typer.Option(help="Tokens per sequence, such as 128K or 1M.")] = "128K",
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 1,
    gpu: Annotated[
        str, typer.Option(help=f"Plan for another GPU: {', '.join(GPUS)}; '' for this machine.")
    ] = "",
    device_memory: Annotated[
        str,
        typer.Option("--device-memory", "--gpu-memory", help="Memory of the GPU, such as 48GiB."),
    ] = "",
    host_memory: Annotated[str, typer.Option(help="Memory of the host, such as 125GiB.")] = "",
    gpu_tflops: Annotated[
        float | None, typer.Option(help="Of a GPU by figures: dense bf16 TFLOP/s.")
    ] = None,
    gpu_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of its memory; left out: of a usual ratio.")
    ] = None,
    gpu_link: Annotated[
        float | None, typer.Option(help="GB/s to the host, each way; left out: PCIe 4.0 x16.")
    ] = None,
    gpus: Annotated[
        int, typer.Option(help="GPUs of one host that share each sequence; the plan is of one.")
    ] = 1,
    sharded_weights: Annotated[
        str, typer.Option(help="GPUs share weights: zero1, zero2 or zero3; '': each has all.")
    ] = "",
    divide_pages: Annotated[
        bool, typer.Option("--divide-pages", help="GPUs divide pages in place of copies of heads.")
    ] = False,
    head_groups: Annotated[
        int, typer.Option(help="Groups in which GPUs exchange a layer's heads.")
    ] = 1,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk; 0: choose.")] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 128,
    budget: Annotated[int, typer.Option(help="Pages per query block (TopKPages); 0: dense.")] = 0,
    keep: Annotated[float, typer.Option(help="Share of chunks swept (SampledChunks).")] = 1.0,
    window: Annotated[
        int | None, typer.Option(help="Chunks that gradient reaches back (TruncatedChunks).")
    ] = None,
    kv_grad_dtype: Annotated[str, typer.Option(help="float32 or bfloat16; '': choose.")] = "",
    main_grad_dtype: Annotated[
        str, typer.Option(help="Of the gradient sums: float32 or bfloat16.")
    ] = "float32",
    main_grad_device: Annotated[
        str, typer.Option(help="Where those of layers are kept: device or host.")
    ] = "device",
    recompute: Annotated[str, typer.Option(help="none, pointwise or layer; '': choose.")] = "",
    keep_outputs: Annotated[str, typer.Option(help=KEEP_HELP)] = "auto",
    weights: Annotated[
        str, typer.Option(help="Frozen weights of layers: device or host.")
    ] = "device",
    optimizer: Annotated[
        str, typer.Option(help=f"{', '.join(OPTIMIZERS)}; '' for none.")
    ] = "adamw_torch_fused",
    optimizer_states: Annotated[
        str, typer.Option(help="Where the optimizer keeps its states: device or host.")
    ] = "device",
    lora_rank: Annotated[int, typer.Option(help="LoRA on every linear layer; 0: full.")] = 0,
    quantization: Annotated[
        str, typer.Option(help="Base under LoRA: nf4, fp4 or int8; '': as it is.")
    ] = "",
    float8: Annotated[
        bool, typer.Option("--float8", help="Linear layers in float8 (rowwise_with_gw_hp).")
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_DTYPES)}; '': the model's.")] = "",
    reference: Annotated[
        bool, typer.Option("--reference", help="A frozen copy beside it: DPO, KTO, GRPO.")
    ] = False,
    images: Annotated[int, typer.Option(help="Images in each sequence.")] = 0,
    image_size: Annotated[
        str, typer.Option(help="Of each, in pixels, as the processor leaves it.")
    ] = "1024x1024",
    accumulate: Annotated[bool, typer.Option(help="Several sequences per optimizer step.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
) -> None:
    """Predict memory of both tiers and seconds of a step, and recommend settings.

    Loads no weights. Exits with 1 where nothing fits, after naming the nearest thing that would.
    """
    chosen: dict[str, Any] = {
        "chunk_size": chunk_size,
        "kv_grad_dtype": kv_grad_dtype,
        "recompute": recompute,
    }
    chosen = {name: value for name, value in chosen.items() if value}
    sizes = {"chunk_size": chunk_size or _least_chunk(page_size)}
    try:
        config = Config(
            page_size=page_size,
            attention=TopKPages(budget=budget) if budget else Dense(),
            backward=_backward(keep, window),
            main_grad_dtype=main_grad_dtype,  # type: ignore[arg-type]
            main_grad_device=main_grad_device,  # type: ignore[arg-type]
            keep_outputs=share_or_word(keep_outputs),  # type: ignore[arg-type]
            weights=weights,  # type: ignore[arg-type]
            divide_pages=divide_pages,
            head_groups=head_groups,
            **(sizes | chosen),
        )
        tokens = parse_length("context", context)
        device_bytes = _whole_memory("device_memory", device_memory)
        host_bytes = _whole_memory("host_memory", host_memory)
        gpu_of_figures(gpu or None, device_bytes, gpu_tflops, gpu_bandwidth, gpu_link)
        if gpus < 1:
            raise ValueError(f"gpus: expected an int >= 1, got {gpus}")
        if batch_size < 1:
            raise ValueError(f"batch_size: expected an int >= 1, got {batch_size}")
        _expect_one_of("dtype", dtype, _DTYPES)
        _expect_one_of("optimizer", optimizer, OPTIMIZERS)
        _expect_one_of("optimizer_states", optimizer_states, ("device", "host"))
        _expect_one_of("sharded_weights", sharded_weights, _SHARDED)
        if sharded_weights and (gpus == 1 or quantization):
            got = "--quantization" if quantization else "one GPU"
            raise ValueError(
                f"sharded_weights: expected --gpus above 1 and no --quantization, got {got}"
            )
        _expect_one_of("quantization", quantization, ("nf4", "fp4", "int8"))
        if quantization and not lora_rank:
            raise ValueError(
                "quantization: expected --lora-rank beside it, got none; quantised weights "
                "cannot be trained themselves"
            )
        if reference and lora_rank:
            raise ValueError(
                "reference: expected no --lora-rank beside it: with adapters the reference is the "
                "model without them, which takes nothing more"
            )
        if images < 0:
            raise ValueError(f"images: expected an int >= 0, got {images}")
        height, width = _image_size(image_size)
        adapter = _lora(lora_rank) if lora_rank else None
    except ValueError as error:
        refuse("plan", error)
    check_out("plan", "--out", out)
    import torch

    from oomb.errors import UnsupportedModelError
    from oomb.plan import Machine, recommend
    from oomb.trace.image_sizes import tokens_of_image

    try:
        image_tokens = images * tokens_of_image(model, height, width) if images else 0
        machine = Machine.described(
            gpu=gpu or None,
            device_memory=device_bytes,
            host_memory=host_bytes,
            tflops=gpu_tflops,
            bandwidth=gpu_bandwidth,
            link=gpu_link,
        )
        if gpus > 1:
            machine = machine.of_rank(gpus, weights=sharded_weights or "replicated")
        result = recommend(
            model,
            tokens,
            machine=machine,
            config=config,
            keep=frozenset(chosen),
            batch_size=batch_size,
            optimizer=optimizer or None,
            optimizer_states=optimizer_states or "device",
            accumulates=accumulate,
            reference=reference,
            image_tokens=image_tokens,
            dtype=getattr(torch, dtype) if dtype else None,
            adapter=adapter,
            quantization=quantization or None,
            float8=float8,
        )
    except (ValueError, UnsupportedModelError) as error:
        refuse("plan", error)
    show(Console(), model, result)
    if out is not None:
        record = result.prediction.as_dict() | {"advice": result.advice}
        out.write_text(json.dumps(record, indent=1) + "\n")
    if not result.fits:
        raise typer.Exit(1)


def _least_chunk(page_size: int) -> int:
    """Of whole pages, and at least as long as the default."""
    page = max(1, page_size)  # what is no size is refused by its name
    return -(-Config.chunk_size // page) * page


def _backward(keep: float, window: int | None) -> BackwardRule:
    if window is None:
        return AllChunks() if keep == 1 else SampledChunks(keep=keep)
    if keep != 1:
        raise ValueError(f"--window: expected all chunks swept beside it, got --keep {keep:g}")
    return TruncatedChunks(window=window)


def _image_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(x.isdecimal() and 0 < int(x) < 10**6 for x in parts):
        raise ValueError(f"image_size: expected HEIGHTxWIDTH such as 1080x1920, got {text!r}")
    return int(parts[0]), int(parts[1])


def _whole_memory(argument: str, text: str) -> int | None:
    """Bytes; a few stand for a unit that was left out."""
    size = parse_size(argument, text or None)
    if size is not None and size < _LEAST_MEMORY:
        raise ValueError(f"{argument}: expected a size with its unit, such as 141GB, got {text!r}")
    return size


def _expect_one_of(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value and value not in choices:
        near = nearest(value, choices)
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, got {value!r}{near}")


def _lora(rank: int) -> Any:
    if rank < 1:
        raise ValueError(f"lora_rank: expected an int >= 1, got {rank}")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("lora_rank: expected peft to be installed (pip install peft)") from error
    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
