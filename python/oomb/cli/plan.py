"""``oomb plan``: what training a model at a context takes, and the settings to do it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from oomb.cli.kept import KEEP_HELP, share_or_word
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
from oomb.units import bytes_text, count_text, parse_size, seconds_text

if TYPE_CHECKING:
    from oomb.plan import Machine, Prediction, Recommendation
    from oomb.plan.duration import Duration

_LEAST_MEMORY = 2**20
_DTYPES = ("bfloat16", "float32", "float16")
_SHARDED = get_args(get_type_hints(Config)["sharded_weights"])
_SOURCES = {
    "measured": "rates measured here",
    "datasheet": "from its datasheet",
    "given": "from the figures given",
}


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
    recompute: Annotated[str, typer.Option(help="none or layer; '': choose.")] = "",
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
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_DTYPES)}; '': the model's.")] = "",
    reference: Annotated[
        bool, typer.Option("--reference", help="A frozen copy beside it: DPO, KTO, GRPO.")
    ] = False,
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
    try:
        config = Config(
            page_size=page_size,
            attention=TopKPages(budget=budget) if budget else Dense(),
            backward=_backward(keep, window),
            main_grad_dtype=main_grad_dtype,  # type: ignore[arg-type]
            main_grad_device=main_grad_device,  # type: ignore[arg-type]
            keep_outputs=share_or_word(keep_outputs),  # type: ignore[arg-type]
            weights=weights,  # type: ignore[arg-type]
            **chosen,
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
        adapter = _lora(lora_rank) if lora_rank else None
    except ValueError as error:
        refuse("plan", error)
    check_out("plan", "--out", out)
    import torch

    from oomb.errors import UnsupportedModelError
    from oomb.plan import Machine, recommend

    try:
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
            dtype=getattr(torch, dtype) if dtype else None,
            adapter=adapter,
            quantization=quantization or None,
        )
    except (ValueError, UnsupportedModelError) as error:
        refuse("plan", error)
    show(Console(), model, result)
    if out is not None:
        record = result.prediction.as_dict() | {"advice": result.advice}
        out.write_text(json.dumps(record, indent=1) + "\n")
    if not result.fits:
        raise typer.Exit(1)


def _backward(keep: float, window: int | None) -> BackwardRule:
    if window is None:
        return AllChunks() if keep == 1 else SampledChunks(keep=keep)
    if keep != 1:
        raise ValueError(f"--window: expected all chunks swept beside it, got --keep {keep:g}")
    return TruncatedChunks(window=window)


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


def show(console: Console, model: str, result: Recommendation) -> None:
    """Print a recommendation."""
    prediction = result.prediction
    verdict = "[green]fits[/green]" if result.fits else "[red]does not fit[/red]"
    console.print(
        f"[bold]{model}[/bold], {prediction.num_tokens:,} tokens"
        + (f" x {prediction.batch_size}" if prediction.batch_size > 1 else "")
        + f", on {_devices(prediction.machine)}: {verdict}"
    )
    console.print(_settings(prediction))
    console.print(_memory(prediction))
    if prediction.duration is not None:
        console.print(_time(prediction))
        if prediction.growth_seconds:
            console.print(_growth(prediction))
    elif not prediction.machine.local:
        console.print("time: unknown; give --gpu or --gpu-tflops")
    if prediction.duration is not None and prediction.duration.weights_hidden_from:
        console.print(_weights(prediction.duration))
    if prediction.duration is not None and prediction.duration.sums_hidden_from:
        hidden = prediction.duration.sums_hidden_from
        console.print(f"gradient sums on the host: the link hides them from chunks of {hidden:,}")
    if prediction.kept_output_bytes:
        console.print(_kept(prediction))
    if prediction.machine.host_assumed:
        host = bytes_text(prediction.machine.host_bytes)
        console.print(f"host memory: {host} is assumed beside that GPU; --host-memory says another")
    if result.remedies:
        console.print(_remedies(result))
    for sentence in result.advice:
        console.print(f"- {sentence}", soft_wrap=True)


def _devices(machine: Machine) -> str:
    return machine.name if machine.ranks == 1 else f"each of {machine.ranks} x {machine.name}"


def _settings(prediction: Prediction) -> str:
    config = prediction.config
    parts = [
        f"chunk_size={config.chunk_size}",
        f"page_size={config.page_size}",
        f"kv_grad_dtype={config.kv_grad_dtype}",
        f"main_grad_dtype={config.main_grad_dtype}",
        *(["main_grad_device=host"] if config.main_grad_device == "host" else []),
        f"recompute={config.recompute}",
        f"keep_outputs={config.keep_outputs}",
        f"weights={config.weights}",
        *(
            []
            if prediction.machine.weights == "replicated"
            else [f"sharded_weights={prediction.machine.weights}"]
        ),
        f"attention={config.attention!r}",
        f"backward={config.backward!r}",
        f"optimizer={prediction.optimizer}",
        *(["optimizer_states=host"] if prediction.optimizer_states == "host" else []),
    ]
    return "settings: " + ", ".join(parts)


def _memory(prediction: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True)
    table.add_column("memory")
    table.add_column("device", justify="right", min_width=12)
    table.add_column("host", justify="right", min_width=12)
    config = prediction.config
    rows = (
        ("parameters", prediction.parameter_bytes, prediction.weight_host_bytes),
        ("reference", prediction.reference_bytes, 0),
        ("optimizer", prediction.optimizer_bytes, prediction.optimizer_host_bytes),
        ("kept gradients", prediction.kept_gradient_bytes, 0),
        (
            f"gradient sums ({config.main_grad_dtype})",
            prediction.sum_bytes,
            prediction.sum_host_bytes,
        ),
        ("gathered weights", prediction.gathered_bytes, 0),
        (
            "a chunk's activations, logits",
            prediction.call_bytes - prediction.sum_bytes - prediction.gathered_bytes,
            0,
        ),
        ("pages", prediction.device_pool_bytes, prediction.host_pool_bytes),
        ("page lists", 0, prediction.list_bytes),
        ("states between chunks", 0, prediction.border_bytes),
    )
    for name, device, host in rows:
        if device or host:
            table.add_row(name, bytes_text(device), bytes_text(host) if host else "")
    machine = prediction.machine
    table.add_row(
        "[bold]peak[/bold]", *map(bytes_text, (prediction.device_bytes, prediction.host_bytes))
    )
    shared = machine.device_type == "cpu"
    there = (
        bytes_text(machine.device_bytes),
        "shared" if shared else bytes_text(machine.host_bytes),
    )
    table.add_row("there is", *there)
    return table


def _weights(duration: Duration) -> str:
    return (
        f"weights from the host: compute waits {seconds_text(duration.weights)} for them; the link "
        f"hides them in chunks of {duration.weights_hidden_from:,} tokens or more"
    )


def _kept(prediction: Prediction) -> str:
    duration = prediction.duration
    saved = "" if duration is None else f", spare {seconds_text(duration.spared)} of attention"
    return (
        f"kept outputs: {prediction.kept_output_share:.0%} of attention's, "
        f"{bytes_text(prediction.kept_output_bytes)} of the pages' memory{saved}"
    )


def _remedies(result: Recommendation) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True)
    table.add_column("what would need less", overflow="fold")
    for name in ("saves", "host", "seconds", "fits"):
        table.add_column(name, justify="right")
    for one in result.remedies:
        seconds = "" if one.seconds is None else f"{one.seconds:+.1f}"
        table.add_row(
            str(one),
            bytes_text(max(0, one.saved_bytes)),
            f"+{bytes_text(one.host_bytes)}" if one.host_bytes > 0 else "",
            seconds,
            "yes" if one.fits else "no",
        )
    return table


def _time(prediction: Prediction) -> str:
    duration = prediction.duration
    assert duration is not None
    names = ["matrix", "attention", "elementwise", "copies", "starting"]
    names += ["exchange"] if duration.exchange else []
    names += ["weights"] if duration.weights_hidden_from else []
    names += ["sums"] if duration.sums_hidden_from else []
    parts = [f"{name} {seconds_text(getattr(duration, name))}" for name in names]
    source, step = _SOURCES[duration.basis], prediction.optimizer_seconds
    speed = prediction.num_tokens * prediction.batch_size / duration.total
    return (
        f"time: {seconds_text(duration.total)} per sequence step, {count_text(speed)} tokens/s "
        f"({', '.join(parts)}; {source})"
        + (f"; the optimizer's step {seconds_text(step)}" if step else "")
    )


def _growth(prediction: Prediction) -> str:
    assert prediction.growth_seconds is not None
    return (
        f"the first step: about {seconds_text(prediction.growth_seconds)} more, while "
        f"{bytes_text(prediction.host_pool_bytes)} of the host's memory are pinned, if they are "
        "new to the machine"
    )
