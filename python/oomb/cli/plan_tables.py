"""Tables that ``oomb plan`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oomb.cli.kept import levels_text
from oomb.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from oomb.plan import Machine, Prediction, Recommendation
    from oomb.plan.duration import Duration

_SOURCES = {
    "measured": "rates measured here",
    "datasheet": "from its datasheet",
    "given": "from the figures given",
}


def show(console: Console, model: str, result: Recommendation) -> None:
    """Print a recommendation."""
    prediction = result.prediction
    verdict = "[green]fits[/green]" if result.fits else "[red]does not fit[/red]"
    console.print(
        f"[bold]{escape(model)}[/bold], {prediction.num_tokens:,} tokens"
        + (f" x {prediction.batch_size}" if prediction.batch_size > 1 else "")
        + f", on {escape(_devices(prediction.machine))}: {verdict}"
    )
    console.print(_settings(prediction), markup=False)
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
    if prediction.kept_output_bytes or prediction.kept_mlp_output_bytes:
        console.print(_kept(prediction))
    if prediction.machine.host_assumed:
        host = bytes_text(prediction.machine.host_bytes)
        console.print(f"host memory: {host} is assumed beside that GPU; --host-memory says another")
    if result.remedies:
        console.print(_remedies(result))
    for sentence in result.advice:
        console.print(f"- {sentence}", markup=False, soft_wrap=True)


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
        *(["divide_pages=True"] if config.divide_pages else []),
        *([f"head_groups={config.head_groups}"] if config.head_groups > 1 else []),
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
        ("images, before the chunks", prediction.image_bytes, 0),
        ("features of images", 0, prediction.image_host_bytes),
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
    several = len(prediction.recomputed) > 1
    in_room = f"; recompute {levels_text(prediction.recomputed)}" if several else ""
    saved = "" if duration is None else f", spare {seconds_text(duration.spared)}"
    of_mlps = prediction.kept_mlp_output_bytes
    return (
        f"kept outputs: {prediction.kept_output_share:.0%} of attention's, "
        f"{bytes_text(prediction.kept_output_bytes)}"
        f"{f', and {bytes_text(of_mlps)} of MLPs' if of_mlps else ''}{saved}{in_room}"
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
    names += [name for name in ("exchange", "images") if getattr(duration, name)]
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
