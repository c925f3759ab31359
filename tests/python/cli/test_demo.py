"""The demo's parts at small sizes. The command as a whole runs once, in its quick size."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from oomb import Config
from oomb.cli import app, demo_run, demo_training
from oomb.cli.demo_gradients import compare_gradients, largest_difference
from oomb.cli.demo_model import small_model
from oomb.cli.demo_picture import LeftOut, Measured, draw
from oomb.cli.demo_process import OutOfBudget, TaskFailed, run_task
from oomb.cli.demo_run import QUICK
from oomb.cli.demo_text import python_source
from oomb.cli.demo_tokenizer import byte_tokenizer
from oomb.cli.demo_training import TrainingRun, TrainingSize

MIB = 1 << 20


def ignore(_: float) -> None:
    """Takes shares of a task that nobody watches."""


def memory_arguments(**changes: object) -> dict[str, object]:
    sizes = {"num_tokens": 1024, "chunk_size": 128, "page_size": 64, "budget": 192 * MIB}
    return {"method": "oomb", **sizes, **changes}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the quick demo printed, and its folder."""
    out = tmp_path_factory.mktemp("demo")
    command = ["demo", "--quick", "--out", str(out)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output, out


def test_prints_its_parts_in_order(ran: tuple[str, Path]) -> None:
    output, out = ran
    parts = ["Gradients", "Memory", "Held-out loss", "Picture:"]
    places = [output.index(part) for part in parts]
    assert places == sorted(places)
    assert str(out / "memory_and_loss.png") in output.replace("\n", "")


def test_gradients_equal_ordinary_ones(ran: tuple[str, Path]) -> None:
    gradients = json.loads((ran[1] / "figures.json").read_text())["gradients"]
    assert gradients["float64"] <= 1e-12
    assert gradients["chunked_error"] <= 2 * gradients["ordinary_error"]


def test_ordinary_training_stops_and_chunked_goes_on(ran: tuple[str, Path]) -> None:
    memory = json.loads((ran[1] / "figures.json").read_text())["memory"]
    assert None in memory["ordinary"].values()
    assert None not in memory["oomb"].values()
    assert len(memory["oomb"]) >= len(memory["ordinary"])


def test_both_runs_learn_the_same(ran: tuple[str, Path]) -> None:
    runs = json.loads((ran[1] / "figures.json").read_text())["training"]
    ordinary, chunked = runs["ordinary"]["losses"], runs["oomb"]["losses"]
    assert ordinary[-1] < ordinary[0] - 0.5
    assert chunked == pytest.approx(ordinary, abs=1e-3)


def test_saves_a_picture(ran: tuple[str, Path]) -> None:
    picture = (ran[1] / "memory_and_loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_saves_a_model_that_loads(ran: tuple[str, Path]) -> None:
    runs = json.loads((ran[1] / "figures.json").read_text())["training"]
    model = AutoModelForCausalLM.from_pretrained(ran[1] / "model", local_files_only=True)
    ids = python_source().held_out_batch(512)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss == pytest.approx(runs["oomb"]["losses"][-1], abs=1e-3)


def test_saves_its_tokenizer_and_text(ran: tuple[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ran[1] / "model")
    text = (ran[1] / "text" / "held_out.txt").read_bytes()
    assert text == python_source().held_out.numpy().tobytes()
    assert bytes(tokenizer(text[:5000].decode())["input_ids"]) == text[:5000]
    assert (ran[1] / "text" / "train.txt").read_text(encoding="utf-8")


def test_every_byte_has_a_token() -> None:
    tokenizer, text = byte_tokenizer(), "".join(map(chr, range(0x250))) + "€ 𝄞\n"
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


@pytest.mark.parametrize("kind", [AutoTokenizer, PreTrainedTokenizerFast])
def test_the_saved_tokenizer_is_the_same(kind: Any, tmp_path: Path) -> None:
    """Beside the demo's model, however it is loaded, and on text that has other models' tokens."""
    small_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded, own = kind.from_pretrained(tmp_path), byte_tokenizer()
    text = "def f(x):\r\n\treturn 12345  # ünï <|endoftext|> <s> 𝄞"
    ids = loaded(text)["input_ids"]
    assert bytes(ids) == text.encode() and ids == own(text)["input_ids"]
    assert loaded.decode(ids) == text
    assert len(loaded) == 256 and not loaded.all_special_tokens


def test_gradient_comparison_sees_a_difference() -> None:
    reference = {"a": torch.ones(4), "b": torch.ones(4)}
    ours = {"a": torch.ones(4), "b": torch.tensor([1.0, 1.0, 1.0, 3.0])}
    assert largest_difference(ours, reference) == pytest.approx(1.0)


def test_gradients_of_a_partial_last_chunk() -> None:
    found = compare_gradients(
        python_source().batch(0, 150), Config(chunk_size=64, page_size=16), ignore
    )
    assert found.float64 <= 1e-12


def test_memory_run_stops_at_its_budget() -> None:
    with pytest.raises(OutOfBudget):
        run_task("memory", memory_arguments(budget=8 * MIB), ignore)


def test_memory_run_reports_its_use_and_its_progress() -> None:
    shares: list[float] = []
    use = run_task("memory", memory_arguments(), shares.append)
    assert 0 < use["pages"] < use["peak"] < 192 * MIB
    assert shares[:-1] == sorted(shares[:-1]) and len(shares) > 8


def test_other_failures_are_told() -> None:
    with pytest.raises(RuntimeError, match="multiple of page_size"):
        run_task("memory", memory_arguments(chunk_size=100), ignore)


@pytest.mark.parametrize("out", ["file", "file/folder", "/proc/x"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Path] = []
    monkeypatch.setattr(demo_run, "run", lambda folder, *_: began.append(folder))
    (tmp_path / "file").write_text("a book")
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / out)])
    assert result.exit_code == 2 and not began
    assert result.output.startswith("oomb demo: --out: expected a folder to write to, got /")
    assert (tmp_path / "file").read_text() == "a book"
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new" / "folder")])
    assert result.exit_code == 0 and began == [tmp_path / "new" / "folder"]
    assert not list(began[0].iterdir())


@pytest.mark.parametrize(
    "error", [TaskFailed("task 'memory' failed:\nwhy"), OutOfBudget("why"), OSError(28, "why")]
)
def test_a_failed_demo_says_why(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo_run, "run", fail)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.output == f"oomb demo: {error}\n"


def test_a_killed_task_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing itself."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TaskFailed, match="task 'memory' failed:\nexit status 1"):
        run_task("memory", {}, ignore)


def test_paths_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Brackets are no markup."""
    for part in ("compare_gradients", "show_gradients", "show_memory", "show_training", "draw"):
        monkeypatch.setattr(demo_run, part, lambda *_: None)
    for part in ("measure_memory", "train"):
        monkeypatch.setattr(demo_run, part, lambda *_: (None, None))
    monkeypatch.setattr(demo_run, "_figures", lambda *_: {})
    out = tmp_path / "x[red]" / "b[/b]"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)])
    assert result.exit_code == 0, result.exception
    assert (
        f"Figures: {out}/figures.json\nModel:   {out}/model\nText:    {out}/text\n" in result.output
    )


def test_training_evaluates_as_often_as_asked() -> None:
    size = {"num_steps": 4, "num_tokens": 64, "held_out_tokens": 64, "evaluate_every": 2}
    assert TrainingSize(**size)
    run = demo_training.task(on_share=ignore, method="oomb", size=size, chunk_size=32, page_size=16)
    assert run["steps"] == [0, 2, 4]


def test_text_is_the_same_each_time_and_cut_in_two() -> None:
    one, two = python_source(), python_source()
    assert torch.equal(one.train, two.train) and torch.equal(one.held_out, two.held_out)
    assert one.train.numel() > 4 * MIB and one.held_out.numel() > MIB // 4


def test_text_starts_over_at_its_end() -> None:
    text = python_source()
    size = text.train.numel()
    assert torch.equal(text.batch(size - 2, 4)[0, 2:], text.batch(0, 2)[0])


def test_no_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no source"):
        python_source(tmp_path)


# Lengths that stop, and lengths that there is no time for -----------------------------------------


class SlowMachine:
    """In place of the demo's processes: a length takes its square in seconds, or does not fit."""

    def __init__(self, fits: dict[str, int]) -> None:
        self.fits, self.now = fits, 0.0

    def monotonic(self) -> float:
        return self.now

    def run_task(self, task: str, arguments: dict[str, Any], _: object) -> dict[str, Any]:
        tokens = arguments["num_tokens"]
        if tokens > self.fits[arguments["method"]]:
            raise OutOfBudget
        seconds = (tokens / 1024) ** 2
        self.now += seconds
        used = int(0.9 * QUICK.budget * tokens / self.fits[arguments["method"]])
        return {"peak": used, "pages": used // 2, "process": used, "seconds": seconds}


def measured(
    monkeypatch: pytest.MonkeyPatch, fits: dict[str, int], seconds: float
) -> tuple[Measured, LeftOut, str]:
    """What the memory part finds and prints on such a machine within ``seconds``."""
    machine = SlowMachine(fits)
    monkeypatch.setattr(demo_run, "run_task", machine.run_task)
    monkeypatch.setattr(demo_run, "time", machine)
    console = Console(file=io.StringIO(), width=120)
    size = replace(QUICK, lengths=LENGTHS)
    memory, left_out = demo_run.measure_memory(console, size, seconds)
    demo_run.show_memory(console, size, memory, left_out)
    return memory, left_out, console.file.getvalue()  # type: ignore[attr-defined]


def drawn(
    monkeypatch: pytest.MonkeyPatch, path: Path, memory: Measured, left_out: LeftOut
) -> tuple[dict[str, float], list[str]]:
    """Tokens at which each colour has its cross, and the legend."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda _: None)
    run = TrainingRun([0, 1], [5.0, 4.0])
    draw(path, memory, left_out, QUICK.budget, run, run)
    axes = pyplot.gcf().axes[0]
    crosses = {line.get_color(): line for line in axes.lines if line.get_marker() == "x"}
    legend = axes.get_legend()
    assert legend is not None
    monkeypatch.undo()
    pyplot.close("all")
    return (
        {color: float(line.get_xdata()[0]) for color, line in crosses.items()},  # type: ignore
        [text.get_text() for text in legend.get_texts()],
    )


LENGTHS = (1024, 2048, 4096, 8192)
FITS = {"ordinary": 1024, "checkpointing": 4096, "oomb": 1 << 20}
ORANGE, YELLOW = "#D55E00", "#E69F00"


def test_every_length_is_run_without_a_limit_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, left_out, said = measured(monkeypatch, FITS, math.inf)
    assert not left_out and "eft out" not in said
    assert list(memory["oomb"]) == list(LENGTHS) and said.count("stops") == 2
    crosses, legend = drawn(monkeypatch, tmp_path / "p.png", memory, left_out)
    # One point of the first has no slope: its cross stands where it stopped. The second's is on it.
    assert crosses == {ORANGE: 2048.0, YELLOW: pytest.approx(4096 / 0.9)}
    assert not any("left out" in text for text in legend)


def test_what_there_was_no_time_for_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, left_out, said = measured(monkeypatch, FITS, 30.0)
    assert left_out == {"oomb": [8192], "checkpointing": [4096, 8192]}
    assert "OOMB at 8,192 tokens" in said and "checkpointing at 4,096, 8,192 tokens" in said
    crosses, legend = drawn(monkeypatch, tmp_path / "p.png", memory, left_out)
    assert list(crosses) == [ORANGE]
    assert "ordinary, with checkpointing\n(4K, 8K left out: no time)" in legend
    assert "OOMB\n(8K left out: no time)" in legend
