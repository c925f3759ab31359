"""``oomb bench step`` at toy size, and the ways to train that it compares with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from typer.testing import CliRunner

import oomb
from oomb.cli import app, bench_rivals, bench_run
from oomb.cli.bench_rivals import measure_rivals
from oomb.cli.bench_step import StepBench, slopes
from oomb.plan.gpus import gpu_of_device
from oomb.rivals import kept
from oomb.rivals.training import Ordinary, Tuned, TunedKept
from oomb.trace.shapes import SHAPES, ModelShape, random_model

TINY = {
    family: ModelShape(family, 3, 64, 128, 4, 2, 16, 500) for family in ("qwen2", "llama", "qwen3")
}
CONFIG = oomb.Config(chunk_size=64, page_size=8)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY["qwen2"])
    return "tiny"


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return random_model(TINY[family], device="cpu", dtype=torch.float32, positions=4096)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(*arguments: str) -> str:
    small = ["--chunk-size", "64", "--page-size", "8", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "step", *arguments, *small])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("kind", [Ordinary, Tuned, TunedKept])
def test_rivals_train_as_an_ordinary_step(family: str, kind: type[Ordinary] | type[Tuned]) -> None:
    """More tokens than a tile, and the modules are as before afterwards."""
    model, ids = model_of(family), torch.randint(500, (1, 150))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected, loss = gradients(model), None
    model.zero_grad()
    rival = kind(model, TINY[family])
    with rival.prepared(150):
        loss = rival.step(ids)
    with torch.no_grad():
        assert torch.allclose(loss, model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert gradients(model).keys() == expected.keys()
    for name, value in gradients(model).items():
        assert (value - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert not model.is_gradient_checkpointing


class _Attention(TorchDispatchMode):
    """Counts how often attention runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += func in kept._ATTENTION
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "forwards"), [(Tuned, 6), (TunedKept, 3)])
def test_kept_attention_is_not_run_again_in_fp64(kind: type[Tuned], forwards: int) -> None:
    """Twice on the same host memory, so that the second step would see what the first has left."""
    torch.manual_seed(0)
    model = random_model(TINY["qwen3"], device="cpu", dtype=torch.float64, positions=4096)
    other, ids = torch.randint(500, (1, 150)), torch.randint(500, (1, 150))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = gradients(model)
    rival = kind(model, TINY["qwen3"])
    with rival.prepared(150):
        rival.step(other)
        model.zero_grad()
        with _Attention() as attention:
            rival.step(ids)
    assert attention.forwards == forwards
    for name, value in gradients(model).items():
        # transformers' loss is in fp32 in the step that is compared with
        assert (value - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


@pytest.mark.parametrize("lengths", ["200", "200,400"])
def test_tables_are_printed_once_and_fit_a_terminal(tiny: str, lengths: str) -> None:
    options = ["--tokens", lengths, "--attention", "topk", "--keep-outputs", "none"]
    lines = run("--model", tiny, *options).splitlines()
    tables = [line for line in lines if line.lstrip().startswith("tokens ")]
    assert len(tables) == 2  # time, memory
    assert all(len(line) <= 80 for line in lines if not line.startswith("FLOP"))
    assert "MFU" not in "".join(lines)  # of no GPU
    rows = [line for line in lines if line.split()[:1] in (["200"], ["400"])]
    steps = [line for line in rows if "tokens:" in line]
    number = len(lengths.split(","))
    assert (len(rows) - len(steps), len(steps)) == (2 * number, number if number > 1 else 0)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", None),
        ("Tesla T4", None),
    ],
)
def test_rates_of_a_gpu_by_its_drivers_name(name: str, flops: float | None) -> None:
    gpu = gpu_of_device(name)
    assert (gpu.flops if gpu else None) == flops


def test_kept_outputs_are_told(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    text = run("--model", tiny, "--tokens", "400", "--keep-outputs", "0.5", "--out", str(out))
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kept_output_share"] == 0.5 and row["kept_output_bytes"] > 0
    assert "50% of attention's outputs were kept" in text
    result = CliRunner().invoke(app, ["bench", "step", "--keep-outputs", "1.5"])
    assert result.exit_code == 2 and "keep_outputs: expected" in result.output


def test_against(tiny: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    lines = ["--model", tiny, "--tokens", "200,400", "--out", str(out), "--plot", str(plot)]
    text = run(*lines, "--against")
    record = json.loads(out.read_text())
    assert [row["tokens"] for row in record["rows"]] == [200, 400]
    assert [(r["name"], r["tokens"], r["fits"]) for r in record["rivals"]] == [
        ("ordinary", 200, True),
        ("ordinary", 400, True),
        ("tuned", 200, True),
        ("tuned", 400, True),
        ("tuned-kept", 200, True),
        ("tuned-kept", 400, True),
    ]
    ours = {row["tokens"]: row for row in record["rows"]}
    for rival in record["rivals"]:
        own = ours[rival["tokens"]]
        assert rival["loss"] == pytest.approx(own["loss"], rel=1e-5)  # the same tokens
        assert rival["seconds_to_ours"] == pytest.approx(rival["seconds"] / own["seconds"])
        assert rival["tokens_per_second"] == pytest.approx(rival["tokens"] / rival["seconds"])
    inputs, outputs, sums = 400 * 64 * 4, 400 * 64 * 4, 400 * 4 * 4
    assert record["rivals"][3]["host_bytes"] == 3 * inputs
    assert record["rivals"][5]["host_bytes"] == 3 * (inputs + outputs + sums)
    assert set(record["plans"]) == {"200", "400"}
    assert "tuned" in text and "seconds ÷ ours" in text
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_fit_is_not_tried(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 400 tokens do not fit, those of 200 do; the tuned way has none of them."""
    needed = Ordinary(model_of("qwen2"), TINY["qwen2"]).least_device_bytes(400)
    monkeypatch.setattr(bench_rivals, "free_memory", lambda _: needed - 1)
    text = " ".join(run("--model", tiny, "--tokens", "200,400", "--against").split())
    assert "ordinary at 400 tokens does not fit; foreseen: needs at least" in text
    assert "of device memory" in text
    assert "ordinary at 200" not in text
    assert "tuned at" not in text


def test_out_of_memory_is_told_and_the_next_rival_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of("qwen2"), []

    def step(self: Ordinary, ids: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        if ids.shape[1] > 150:
            model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB\nand more")
        return torch.zeros(())

    monkeypatch.setattr(Ordinary, "step", step)
    ours: dict[int, dict[str, Any]] = {n: {"seconds": 1.0} for n in (100, 200, 300)}
    rows = list(measure_rivals(model, TINY["qwen2"], ours, 1, 64))
    told = [(row["name"], row["tokens"], row["fits"]) for row in rows]
    assert told[:3] == [("ordinary", 100, True), ("ordinary", 200, False), ("ordinary", 300, False)]
    assert all(fits for _, _, fits in told[3:])
    assert rows[1]["why"] == "tried: Tried to allocate 20 GiB"
    assert calls == [64, 100, 200]  # nothing longer is tried
    assert all(p.grad is None for p in model.parameters())


def test_distinct_pages_are_those_of_the_recorded_selection() -> None:
    model = model_of("qwen2")
    attention = oomb.TopKPages(budget=4, share="kv_head")
    config = oomb.Config(chunk_size=64, page_size=8, attention=attention, record_selection=True)
    with oomb.Engine(model, config) as engine:
        row = StepBench(engine, model, TINY["qwen2"]).run(300)
        ids = torch.randint(500, (1, 300), generator=torch.Generator().manual_seed(300))
        selection = engine.forward_backward(ids, ids).selection
    counts: dict[int, list[int]] = {}
    for of_layer in selection:
        for chunk, lists in enumerate(of_layer):
            if lists is not None:
                pages = {page for page in lists.flatten().tolist() if page >= 0}
                counts.setdefault(chunk, []).append(len(pages))
    every = [count for of_chunk in counts.values() for count in of_chunk]
    assert row["distinct_pages_mean"] == pytest.approx(sum(every) / len(every))
    assert row["distinct_pages_max"] == max(every)
    assert row["distinct_pages_by_chunk"] == [
        (chunk, pytest.approx(sum(n) / len(n)), max(n)) for chunk, n in sorted(counts.items())
    ]


def test_dense_rows_have_no_distinct_pages() -> None:
    model = model_of("qwen2")
    with oomb.Engine(model, CONFIG) as engine:
        row = StepBench(engine, model, TINY["qwen2"]).run(300)
    assert "distinct_pages_mean" not in row


def test_slope_of_gpu_memory_is_between_the_last_steps_of_the_lengths() -> None:
    def row(tokens: int, torch_peak: int, pools: int, driver: int) -> dict[str, int]:
        names = ("tokens", "torch_peak_bytes", "device_peak_bytes", "driver_used_bytes")
        return dict(zip(names, (tokens, torch_peak, pools, driver), strict=True))

    rows = [
        row(10_000, 99_000_000, 0, 0),  # a first step
        row(10_000, 1_000_000, 500_000, 9_000_000),
        row(30_000, 4_000_000, 1_500_000, 10_000_000),
        row(20_000, 7, 7, 7),
    ]
    assert slopes(rows) == pytest.approx({"allocators": 2.0, "driver": 0.5})
    assert slopes(rows[:2]) == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "gpt-2"),
        ("--tokens", "many"),
        ("--tokens", "1"),
        ("--attention", "some"),
        ("--selection", "best"),
        ("--chunk-size", "1000"),
        ("--device-memory", "4XB"),
        ("--keep", "7"),
        ("--layers", "-1"),
        ("--steps", "0"),
        ("--out", "/proc/x/y"),
    ],
)
def test_bad_options_are_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cpu", option, value])
    assert result.exit_code == 2
    assert value.lstrip("-") in result.output or "greater than or equal" in result.output
    assert "Traceback" not in result.output


def test_a_picture_of_no_known_kind_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_run, "run", lambda *_, **__: None)
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cpu", "--plot", "p.txt"])
    assert result.exit_code == 2 and "plot: expected a name in one of" in result.output


def test_memory_that_does_not_suffice_is_told_in_one_line(tiny: str) -> None:
    small = ["--device-memory", "1KiB", "--host-memory", "1KiB", "--tokens", "300"]
    sizes = ["--chunk-size", "64", "--page-size", "8", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "step", "--model", tiny, *small, *sizes])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.output.startswith("oomb bench step: device_memory: expected at least")
    assert result.output.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_use_the_cpu() -> None:
    result = CliRunner().invoke(app, ["bench", "step"])
    assert result.exit_code == 2
    assert "got none" in result.output and "--device cpu" in result.output


@pytest.mark.parametrize("divided", [False, True])
def test_pages_are_divided_where_it_is_asked(
    tiny: str, monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    configs: list[oomb.Config] = []
    monkeypatch.setattr(bench_run, "run", lambda *given, **_: configs.append(given[2]))
    run("--model", tiny, "--tokens", "300", *(["--divide-pages"] if divided else []))
    assert [config.divide_pages for config in configs] == [divided]


@pytest.mark.parametrize("groups", [1, 4])
def test_heads_are_exchanged_in_groups_where_it_is_asked(
    tiny: str, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    configs: list[oomb.Config] = []
    monkeypatch.setattr(bench_run, "run", lambda *given, **_: configs.append(given[2]))
    run("--model", tiny, "--tokens", "300", *(["--head-groups", "4"] if groups > 1 else []))
    assert [config.head_groups for config in configs] == [groups]


@pytest.mark.parametrize("ordered", [True, False])
def test_sums_may_come_in_any_order_where_it_is_asked(
    tiny: str, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    configs: list[oomb.Config] = []
    monkeypatch.setattr(bench_run, "run", lambda *given, **_: configs.append(given[2]))
    run("--model", tiny, "--tokens", "300", *([] if ordered else ["--no-deterministic"]))
    assert [config.deterministic for config in configs] == [ordered]
