"""The page: what it shows against the records it was made from."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oomb.cli import app
from oomb.monitor import METRICS_FILE, MetricsWriter, RunMonitor, read_metrics
from oomb.report import write_report
from oomb.report.scale import power_of_ten

from .drawn import points, svgs
from .small_run import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(RunMonitor(folder, display=False, chunk_records_every=2), steps=3)
    return folder


def steps_only(folder: Path, *losses: float | None, **info: Any) -> Path:
    with MetricsWriter(folder / METRICS_FILE) as writer:
        writer.write("start", {"model": "m", **info})
        for step, loss in enumerate(losses, start=1):
            writer.write("step", {"step": step, "loss": loss, "seconds": 1.0})
    return folder


class Page(HTMLParser):
    """Tags that are open, what they refer to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in ("meta", "img", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "rect", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + "\n"


def test_page_is_well_formed_and_loads_nothing(folder: Path) -> None:
    text = write_report(folder).read_text()
    page = Page(text)
    assert not page.open
    assert page.references
    assert all(r.startswith("data:image/png;base64,") for r in page.references)
    assert not re.search(r"https?:|url\(|@import|<link|<script ", text)
    assert text.count("<script>") == 1
    assert "content=\"default-src 'none'; img-src data:;" in text
    assert len(svgs(text)) == 6  # loss, throughput, breakdown, tiers, chunks, traffic


def test_page_tells_the_runs_figures_and_settings(folder: Path) -> None:
    words = Page(write_report(folder).read_text()).words
    metrics = read_metrics(folder / METRICS_FILE)
    assert f"{metrics.steps[-1]['loss']:.4f}" in words
    assert f"{metrics.evals[0]['loss']:.4f}" in words
    assert "Memory tiers in step 3" in words and "Pages read in step 3" in words
    assert "config.attention.budget\n2" in words and "ended: done" in words


def test_maps_hold_the_recorded_shares(folder: Path) -> None:
    metrics = read_metrics(folder / METRICS_FILE)
    pictures = Page(write_report(folder).read_text()).references
    assert len(pictures) == 3
    for picture, record in zip(pictures, metrics.selections[3], strict=True):
        pixels = decoded(base64.b64decode(picture.split(",")[1]))
        size = len(record["read"])
        assert len(pixels) == size
        for row, percents in zip(pixels, record["read"], strict=True):
            shown = [alpha > 0 for alpha in row]
            assert shown == [p > 0 for p in percents] + [False] * (size - len(percents))
            assert all(a == 255 for a, p in zip(row, percents, strict=False) if p == 100)


def decoded(png: bytes) -> list[list[int]]:
    """Alpha of each pixel of an RGBA PNG whose lines are not filtered; checksums are verified."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    parts, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length)[0] == zlib.crc32(kind + data)
        parts[kind] = data
        at += 12 + length
    width, height, depth, colors = struct.unpack_from(">IIBB", parts[b"IHDR"])
    assert depth == 8 and colors == 6
    lines, stride = zlib.decompress(parts[b"IDAT"]), 1 + 4 * width
    assert all(lines[y * stride] == 0 for y in range(height))
    return [list(lines[y * stride + 4 : (y + 1) * stride : 4]) for y in range(height)]


def test_short_runs_are_smoothed_and_evaluations_joined(tmp_path: Path) -> None:
    steps_only(tmp_path, 4.0, 3.0, 3.5, 2.0)
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        for step in (0, 2, 4):
            writer.write("eval", {"step": step, "loss": 4.0 - step / 4})
    text = write_report(tmp_path).read_text()
    lines = {p.get("class"): p.get("d", "") for p in svgs(text)[0].iter("path")}
    assert len(points(lines["line s0 faint"])) == len(points(lines["line s0"])) == 4
    assert len(points(lines["line s1 thin"])) == 3
    assert "training, smoothed" in text


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        (None, ("eval_<a>", 3.5)),
        ("eval_loss", ("eval_<a>", 3.5)),
        ("eval_b_loss", ("eval_b", 1.5)),
        ("b_accuracy", ("eval_b", 1.5)),
        ("eval_b_2_loss", ("eval_b_2", 0.5)),
    ],
)
def test_evaluations_of_several_sets_are_told_apart(
    tmp_path: Path, metric: str | None, best: tuple[str, float]
) -> None:
    steps_only(tmp_path, 4.0, 3.0, metric_for_best_model=metric)
    sets = {"eval_<a>": (4.5, 3.5), "eval_b": (1.5, 2.5), "eval_b_2": (0.75, 0.5)}
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        for step in (1, 2):
            for name, losses in sets.items():
                record = {"step": step, "loss": losses[step - 1], "name": name}
                writer.write("eval", record)
    text = write_report(tmp_path).read_text()
    words = Page(text).words
    assert f"{best[1]:.4f}\nbest evaluation, {best[0]}\n" in words
    for name, losses in sets.items():
        step = 1 + losses.index(min(losses))
        assert f"{name}\n{min(losses):.4f}\n{step}\n{losses[-1]:.4f}\n" in words
        assert f"evaluation, {name}" in words
    lines = {p.get("class") for p in svgs(text)[0].iter("path")}
    assert {f"line s{color} thin" for color in (1, 2, 3)} <= lines


def test_learning_rates_are_drawn_in_a_unit_that_reads_well(tmp_path: Path) -> None:
    steps_only(tmp_path, 3.0)
    assert "Learning rate" not in write_report(tmp_path).read_text()
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        writer.write("step", {"step": 2, "loss": 1.0, "seconds": 1.0, "learning_rate": 2e-5})
        writer.write("step", {"step": 3, "loss": 1.0, "seconds": 1.0, "learning_rate": 1e-5})
    assert "learning rate, in 10⁻⁵" in write_report(tmp_path).read_text()
    assert power_of_ten(0.02) == (1.0, "") and power_of_ten(9.99e-4)[1] == "10⁻³"


def test_limits_of_the_tiers_are_drawn_or_told(tmp_path: Path) -> None:
    chunk = {"num_chunks": 2, "seconds": 1.0, "h2d_bytes": 0, "d2h_bytes": 0}
    chunk |= {"exposed_copy_seconds": 0.0, "device_bytes": 1 << 20, "host_bytes": 1 << 20}
    config = {"device_memory": "2MiB", "host_memory": 1 << 30}
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        writer.write("start", {"model": "m", "config": config})
        for place, phase in ((0, "fill"), (1, "sweep"), (0, "sweep")):
            writer.write("chunk", {"step": 1, "phase": phase, "chunk": place, **chunk})
        writer.write("step", {"step": 1, "loss": 1.0, "seconds": 1.0})
    text = write_report(tmp_path).read_text()
    (tiers,) = (svg for svg in svgs(text) if "in each tier" in svg.get("aria-label", ""))
    words = [t.text for t in tiers.iter("text")]
    assert "device tier, limit 2.00 MiB" in words and {"fill", "sweep"} <= set(words)
    assert not any("host" in (word or "") for word in words)
    assert "Beyond the picture: host tier, limit 1.00 GiB." in text


def test_settings_are_readable(tmp_path: Path) -> None:
    config = {"device_memory": 3 << 20, "deterministic": True, "rate": 1e-05, "layers": [1, 2]}
    steps_only(tmp_path, 3.0, num_parameters=7_620_000_000, context=131072, config=config)
    words = Page(write_report(tmp_path).read_text()).words
    for row in (
        "num_parameters\n7.62 B",
        "context\n131,072",
        "config.device_memory\n3.00 MiB",
        "config.deterministic\nyes",
        "config.rate\n1e-05",
        "config.layers\n1, 2",
    ):
        assert row in words


def test_run_that_was_killed_after_one_step(tmp_path: Path) -> None:
    page = Page(write_report(steps_only(tmp_path, 3.0)).read_text())
    assert "no end recorded" in page.words and "3.0000" in page.words


def test_losses_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    text = write_report(steps_only(tmp_path, 3.0, float("nan"), float("inf"))).read_text()
    assert not Page(text).open
    assert "nan" not in text.lower()
    assert write_report(steps_only(tmp_path / "all", float("nan"))).is_file()


def test_text_of_the_run_cannot_break_the_page(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: '</pre><b>'")
    page = Page(write_report(steps_only(tmp_path, 1.0, model="<i>&")).read_text())
    assert not page.open and "<i>&" in page.words and "</pre><b>" in page.words


def test_compared_runs_stand_beside_each_other(folder: Path, tmp_path: Path) -> None:
    other = steps_only(tmp_path / "other", 7.5, 6.25, context=11)
    text = write_report(folder, tmp_path / "page.html", other).read_text()
    page = Page(text)
    assert not page.open
    assert "Side by side" in page.words and "6.2500" in page.words
    assert text.count('<div class="tiles">') == 2
    of = [f"Where the time of a step goes \n{name}\n" for name in (folder.name, "other")]
    assert all(title in page.words for title in of)
    assert "other, training" in page.words and f"{folder.name}, training" in page.words
    assert not (other / "report.html").exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    dense = steps_only(tmp_path / "dense" / "out", 3.0)
    sparse = steps_only(tmp_path / "sparse" / "out", 4.0)
    words = Page(write_report(dense, compare=sparse).read_text()).words
    assert "dense/out, training" in words and "sparse/out, training" in words
    with pytest.raises(ValueError, match=r"^compare: expected another run, got .*out again"):
        write_report(dense, compare=dense / "." / ".." / "out")
    with pytest.raises(FileNotFoundError, match=r"^compare: expected a folder with metrics"):
        write_report(dense, compare=tmp_path)


def test_norms_of_gradients_are_drawn_where_they_are_recorded(tmp_path: Path) -> None:
    steps_only(tmp_path, 3.0, 2.0)
    before = write_report(tmp_path).read_text()
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        writer.write("step", {"step": 3, "loss": 1.0, "seconds": 1.0, "grad_norm": 0.5})
        writer.write("step", {"step": 4, "loss": 1.0, "seconds": 1.0, "grad_norm": 0.7})
    after = write_report(tmp_path).read_text()
    assert "Gradient norm" not in before and "norm of the gradient, before clipping" in after
    assert len(svgs(after)) == len(svgs(before)) + 1


@pytest.mark.parametrize("out", [".", "file/page.html"])
def test_a_page_that_cannot_be_written(tmp_path: Path, out: str) -> None:
    steps_only(tmp_path, 3.0)
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="^out: expected a file to write, got "):
        write_report(tmp_path, tmp_path / out)
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    steps_only(tmp_path, 3.0)
    (tmp_path / "link.html").symlink_to("deep/page.html")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write_report(tmp_path, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    text = (tmp_path / "deep" / "page.html").read_bytes()
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_report(tmp_path, pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.read(reader, 1 << 20) == text
    os.close(reader)


def test_plan_is_shown_beside_what_was_measured(tmp_path: Path) -> None:
    predicted = {"device_bytes": 1 << 30, "seconds": 4.0, "num_tokens": 12345, "basis": "datasheet"}
    plan = {"predicted": predicted, "measured": {"seconds": 5.0}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = Page(write_report(steps_only(tmp_path, 1.0)).read_text()).words
    assert "device, peak of all\n1.00 GiB" in words
    assert words.count("time of a call\n4.00 s\n5.00 s\n1.25") == 1
    assert "12345" not in words and "datasheet" not in words and "_bytes" not in words
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "measured": None}))
    assert "4.00 s" in Page(write_report(tmp_path).read_text()).words


def test_command_writes_the_page(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
    assert result.exit_code == 0 and str(out) in result.output.replace("\n", "")
    assert out.read_text().startswith("<!doctype html>")


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        steps_only(tmp_path / name, 3.0)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "which holds the runs a, b" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a folder with metrics.jsonl"),
        ("", "expected at least one finished step"),
        ("nonsense\n", "line 1: expected a JSON object"),
        ('{"event": "step"}\n', "line 1: step: expected an int, got None"),
        ('{"event": "start"}\n{"event": "step", "step": "x"}\n', "line 2: step: expected an int"),
        (
            '{"event": "start", "resumed_from_step": "x"}\n',
            "line 1: resumed_from_step: expected an int, got 'x'",
        ),
        (
            '{"event": "step", "step": 3, "loss": "x"}\n',
            "metrics.jsonl, step 3: loss: expected a number, got 'x'",
        ),
        (
            '{"event": "step", "step": 3, "fill_seconds": 1e999}\n',
            "metrics.jsonl, step 3: fill_seconds: expected a number, got inf",
        ),
        (
            '{"event": "step", "step": 3}\n{"event": "eval", "step": 3, "loss": [1]}\n',
            "metrics.jsonl, eval 3: loss: expected a number, got [1]",
        ),
    ],
)
def test_bad_folder_is_named_and_nothing_is_written(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / METRICS_FILE).write_text(content)
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "plan.json: expected a JSON object: "),
        ("[]", "plan.json: expected a JSON object"),
        ('{"predicted": [1]}', "plan.json: predicted: expected a JSON object, got [1]"),
        ('{"measured": "x"}', "plan.json: measured: expected a JSON object, got 'x'"),
    ],
)
def test_a_bad_plan_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    result = CliRunner().invoke(app, ["report", str(steps_only(tmp_path, 1.0))])
    assert result.exit_code == 2 and message in result.output


def test_what_other_programs_record_otherwise_is_left_out(tmp_path: Path) -> None:
    plan = {"predicted": {"seconds": 4.0}, "measured": {"seconds": "x"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "run.yaml").write_bytes("name: K\xe4se\n".encode("latin-1"))
    for number, time in enumerate((None, "today", 1e18)):
        steps_only(tmp_path / str(number), 1.0, time=time)
        assert "started" not in write_report(tmp_path / str(number)).read_text()
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        writer.write("start", {"context": "128K"})
        writer.write("chunk", {"step": 1, "phase": "fill", "chunk": 0, "seconds": 1.0})
        for read in (None, [[1, 2]]):
            writer.write("selection", {"step": 1, "layer": 0, "read": read})
        writer.write("step", {"step": 1, "loss": 2.5, "seconds": 1.0, "ranks": 2})
    text = write_report(tmp_path).read_text()
    words = Page(text).words
    assert len(svgs(text)) == 3  # loss, throughput, breakdown: nothing of chunks
    assert "128K tokens" in words and "2.5000" in words and "name: K\ufffdse" in words
    assert "time of a call\n4.00 s\n" in words
    assert "Ranks" not in words and "Pages read" not in words


def test_a_step_whose_chunks_are_whole_is_shown_before_a_later_one(tmp_path: Path) -> None:
    chunk = {"phase": "sweep", "seconds": 1.0, "h2d_bytes": 0, "d2h_bytes": 0}
    chunk |= {"exposed_copy_seconds": 0.0, "device_bytes": 1 << 20, "host_bytes": 1 << 20}
    steps_only(tmp_path, 3.0, 2.0)
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        writer.write("chunk", {"step": 1, **chunk})
        writer.write("chunk", {"step": 2, **chunk, "host_bytes": None})
    words = Page(write_report(tmp_path).read_text()).words
    assert "Memory tiers in step 1" in words and "in step 2" not in words


def test_the_page_alone_goes_to_standard_output(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    arguments = ["report", str(steps_only(tmp_path, 3.0)), "--out", str(pipe)]
    result = CliRunner().invoke(app, arguments)
    os.close(reader)
    assert result.exit_code == 0 and result.stdout == "" and "Report: " in result.stderr
