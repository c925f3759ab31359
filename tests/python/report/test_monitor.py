"""What a run leaves in its folder, against the engine's own results."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import oomb
from oomb.monitor import METRICS_FILE, Display, RunMonitor, read_metrics
from oomb.monitor.selection_map import selection_maps
from oomb.monitor.traffic import ChunkClock

from .small_run import CHUNK, PAGE, TOKENS, run


@pytest.mark.parametrize("calls", [1, 2])
def test_chunk_records_add_up_to_the_steps_statistics(tmp_path: Path, calls: int) -> None:
    results = run(RunMonitor(tmp_path, display=False), steps=1, calls=calls)
    (chunks,) = read_metrics(tmp_path / METRICS_FILE).chunks.values()
    number = -(-(TOKENS - 1) // CHUNK)
    one_call = [("fill", c) for c in range(number - 1)]
    one_call += [("sweep", c) for c in reversed(range(number))]
    assert [(c["phase"], c["chunk"]) for c in chunks] == one_call * calls
    for key in ("h2d_bytes", "d2h_bytes"):
        expected = sum(getattr(r.stats, key) for r in results)
        assert expected > 0
        assert sum(c[key] for c in chunks) == expected
    assert all(c["seconds"] > 0 and c["exposed_copy_seconds"] >= 0 for c in chunks)


def test_bytes_of_the_tiers_are_those_of_the_pages_alive(tmp_path: Path) -> None:
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, keep_outputs="none")
    run(RunMonitor(tmp_path, display=False), steps=1, config=config)
    (chunks,) = read_metrics(tmp_path / METRICS_FILE).chunks.values()
    number, layers, page_bytes = 6, 3, 2 * 2 * PAGE * 8 * 4  # K and V, 2 heads of 8, fp32
    pages_of = CHUNK // PAGE * layers * page_bytes
    for chunk in chunks:
        done = chunk["chunk"] + 1
        # Filled: keys and values of each chunk so far. Swept: gradients of the chunks before, and
        # keys and values but of the one before, which nobody reads again.
        swept = (done - 1) + max(0, done - 2)
        alive = done if chunk["phase"] == "fill" else swept
        assert chunk["device_bytes"] == alive * pages_of and chunk["host_bytes"] == 0
    assert len(chunks) == 2 * number - 1


def test_only_some_steps_record_chunks(tmp_path: Path) -> None:
    run(RunMonitor(tmp_path, display=False, chunk_records_every=2), steps=4)
    metrics = read_metrics(tmp_path / METRICS_FILE)
    assert list(metrics.chunks) == [1, 3] == list(metrics.selections)
    assert [r["step"] for r in metrics.steps] == [1, 2, 3, 4]
    assert metrics.end is not None and metrics.end["reason"] == "done"


def test_records_after_the_end_are_kept(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """An evaluation after training, and a second training."""
    monitor = RunMonitor(tmp_path, display=False)
    run(monitor, steps=2)
    monitor.on_eval({"step": 2, "loss": 7.0})
    metrics = read_metrics(tmp_path / METRICS_FILE)
    assert metrics.evals[-1]["loss"] == 7.0 and metrics.end is not None
    run(monitor, steps=3)
    assert len(read_metrics(tmp_path / METRICS_FILE).steps) == 3
    assert not [w for w in recwarn if "metrics are not recorded" in str(w.message)]


def test_map_shows_the_pages_of_the_selection(tmp_path: Path) -> None:
    (result,) = run(RunMonitor(tmp_path, display=False), steps=1)
    (records,) = read_metrics(tmp_path / METRICS_FILE).selections.values()
    assert [r["layer"] for r in records] == [0, 1, 2]
    for record in records:
        for block, row in enumerate(record["read"]):
            chunk = block * PAGE // CHUNK
            lists = result.selection[record["layer"]][chunk]
            own = set(range(chunk * CHUNK // PAGE, block + 1))
            past = set(range(chunk * CHUNK // PAGE))
            if lists is not None:
                past = set(lists[0, block - chunk * CHUNK // PAGE].flatten().tolist()) - {-1}
            assert row == [100 * (page in own | past) for page in range(block + 1)]


def test_bins_of_a_map_hold_percentages_of_causal_pairs() -> None:
    lists: Any = torch.tensor([[[[0, -1]], [[1, 2]]]], dtype=torch.int32)  # [1, 2 blocks, 1, 2]
    (record,) = selection_maps([[None, None, lists]], 2 * PAGE, PAGE, bins=3)
    assert record["blocks"] == 6 and record["blocks_per_bin"] == 2
    assert record["read"] == [[100], [100, 100], [50, 25, 100]]


def test_of_micro_batches_the_first_is_mapped(tmp_path: Path) -> None:
    monitor = RunMonitor(tmp_path, display=False)
    monitor.on_start({"config": oomb.Config(chunk_size=PAGE, page_size=PAGE)})
    for page in (0, 1):
        lists: Any = torch.tensor([[[[page]]]], dtype=torch.int32)
        monitor.on_selection(1, [[None, None, lists]])
    (records,) = read_metrics(tmp_path / METRICS_FILE).selections.values()
    assert [r["read"] for r in records] == [[[100], [100, 100], [100, 0, 100]]]


def test_chunks_that_were_not_run_read_nothing() -> None:
    lists: Any = torch.tensor([[[[0]]]], dtype=torch.int32)
    (record,) = selection_maps([[None, None, lists, None]], PAGE, PAGE)
    assert record["read"] == [[100], [100, 100], [100, 0, 100], [0, 0, 0, 0]]


def test_a_display_that_fails_does_not_break_the_run(tmp_path: Path) -> None:
    class Broken(Display):
        def on_progress(self, step: int, progress: oomb.Progress) -> None:
            raise RuntimeError("no terminal")

    with pytest.warns(UserWarning, match="the display stopped"):
        results = run(RunMonitor(tmp_path, display=Broken()), steps=2)
    assert len(results) == 2
    assert len(read_metrics(tmp_path / METRICS_FILE).steps) == 2


def test_a_full_disk_does_not_break_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monitor = RunMonitor(tmp_path, display=False)
    monkeypatch.setattr("oomb.monitor.metrics.os.write", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert len(run(monitor, steps=2)) == 2


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    results = run(RunMonitor(tmp_path, display=Display(Console(file=out))), steps=2)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert f"step 2/2  loss {float(results[1].loss):.4f}" in lines[2]
    assert "tokens/s" in lines[2] and "fill" in lines[2] and "device" in lines[2]
    assert " left" in lines[1] and " left" not in lines[2]  # nothing is left after the last
    assert lines[-1].startswith("ended: done")


def test_the_display_names_the_set_of_an_evaluation() -> None:
    out = io.StringIO()
    display = Display(Console(file=out))
    display.on_eval({"step": 2, "loss": 2.5, "name": "eval_a"})
    display.on_eval({"step": 2, "loss": 1.5})
    assert out.getvalue().splitlines() == [
        "step 2: evaluation loss 2.5000 (eval_a)",
        "step 2: evaluation loss 1.5000",
    ]


def test_live_panel_shows_phase_chunks_loss_and_tiers() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=100))
    display.on_start({"model": "runs/[bold]tiny", "max_steps": 10})
    display.on_step({"step": 1, "loss": 2.25, "seconds": 4.0, "tokens_per_second": 1234.0})
    first = oomb.Progress(phase="fill", chunk=2, num_chunks=5, tokens_done=9, seconds=1.0)
    display.on_progress(2, first)
    progress = oomb.Progress(
        phase="sweep",
        chunk=3,
        num_chunks=5,
        tokens_done=32,
        seconds=3.0,
        device_bytes=3 << 30,
        host_bytes=5 << 20,
        h2d_bytes=8_000_000_000,
        d2h_bytes=3_000_000_000,
        exposed_copy_seconds=0.25,
    )
    display.on_progress(2, progress)
    display.on_end({"reason": "done"})
    text = out.getvalue()
    for shown in (
        "runs/[bold]tiny",
        "step 2 of 10",
        "sweep, 2 of 5 chunks",
        "2.2500",
        "1,234 tokens/s",
        "3.00 GiB",
        "5.00 MiB",
        "4.00 GB/s, 1.50 GB/s",
        "0.25 s",
        "left",
        "ended: done",
    ):
        assert shown in text, shown


@pytest.mark.parametrize(
    ("last", "first"), [(("sweep", 0), ("fill", 0)), (("fill", 3), ("fill", 0))]
)
def test_a_new_call_starts_from_nothing_however_slow_it_is(
    last: tuple[str, int], first: tuple[str, int]
) -> None:
    def progress(at: tuple[Any, int], seconds: float, h2d_bytes: int) -> oomb.Progress:
        return oomb.Progress(
            phase=at[0],
            chunk=at[1],
            num_chunks=4,
            tokens_done=1,
            seconds=seconds,
            h2d_bytes=h2d_bytes,
        )

    clock = ChunkClock()
    clock.chunk(progress(last, 1.0, 10))
    record = clock.chunk(progress(first, 5.0, 30))
    assert record["seconds"] == 5.0 and record["h2d_bytes"] == 30


def test_long_steps_print_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomb.monitor.display.LINE_EVERY", 0.0)
    out = io.StringIO()
    display = Display(Console(file=out))
    for phase, chunk in (("fill", 1), ("sweep", 3)):
        progress = oomb.Progress(
            phase=phase,  # type: ignore[arg-type]
            chunk=chunk,
            num_chunks=8,
            tokens_done=1,
            seconds=1.0,
        )
        display.on_progress(7, progress)
    fill, sweep = out.getvalue().splitlines()
    assert "step 7: fill, 2 of 8 chunks" in fill
    assert "step 7: sweep, 5 of 8 chunks" in sweep


def test_bad_interval_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunk_records_every: expected an int >= 1"):
        RunMonitor(tmp_path / "run", chunk_records_every=0)
    assert not (tmp_path / "run").exists()
