"""A run as it goes: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from oomb.monitor.metrics import set_name
from oomb.monitor.observer import Record
from oomb.monitor.traffic import ChunkClock
from oomb.results import Progress, Selection
from oomb.units import bytes_text, count_text, rate_text, seconds_text

LINE_EVERY = 60.0  # seconds between plain lines inside a long step


class Display:
    """Shows a run: step, phase, chunk, speed, time left, loss, both tiers and what moves.

    Args:
        console: where to; None: standard output. If it is no terminal, lines are printed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console()
        self._live: Live | None = None
        self._info: Record = {}
        self._step: Record = {}
        self._eval: Record = {}
        self._clock = ChunkClock()
        self._progress: Progress | None = None
        self._chunk: Record = {}
        self._at = 0  # the step that is running
        self._began = self._printed = time.monotonic()
        self._first_step: int | None = None

    # What a trainer tells -------------------------------------------------------------------------

    def on_start(self, info: Record) -> None:
        self._info = info
        self._began = self._printed = time.monotonic()
        self._console.print(_title(info), highlight=False, markup=False)
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=4
            )
            self._live.start()
            atexit.register(self._live.stop)  # a run that never ends must not hide the cursor

    def on_progress(self, step: int, progress: Progress) -> None:
        self._at, self._progress = step, progress
        if self._first_step is None:
            self._first_step = step
        self._chunk = self._clock.chunk(progress)
        now = time.monotonic()
        if self._live is None and now - self._printed >= LINE_EVERY:
            self._line(
                f"step {step}: {progress.phase}, {_chunks_done(progress)} of {progress.num_chunks} "
                f"chunks, {seconds_text(progress.seconds)}; device "
                f"{bytes_text(progress.device_bytes)}, host {bytes_text(progress.host_bytes)}"
            )

    def on_selection(self, step: int, selection: Selection) -> None:
        pass

    def on_step(self, record: Record) -> None:
        self._step, self._progress = record, None
        if self._first_step is None:
            self._first_step = int(record["step"])
        if self._live is None:
            self._line(self._step_line(record))

    def on_eval(self, record: Record) -> None:
        self._eval = record
        of_set = f" ({set_name(record)})" if set_name(record) else ""
        loss = _number(record.get("loss"))
        self._line(f"step {record.get('step')}: evaluation loss {loss}{of_set}")

    def on_save(self, record: Record) -> None:
        self._line(
            f"step {record.get('step')}: saved {record.get('path')} "
            f"({bytes_text(record.get('bytes') or 0)}, {seconds_text(record.get('seconds') or 0)})"
        )

    def on_end(self, record: Record) -> None:
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self._live.stop)
            self._live = None
        seconds = record.get("seconds")
        after = "" if seconds is None else f" after {seconds_text(seconds)}"
        self._line(f"ended: {record.get('reason')}{after}")

    # Lines ----------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._printed = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _step_line(self, record: Record) -> str:
        total = self._info.get("max_steps")
        parts = [f"step {record['step']}{f'/{total}' if total else ''}"]
        parts.append(f"loss {_number(record.get('loss'))}")
        if record.get("grad_norm") is not None:
            parts.append(f"grad norm {_number(record['grad_norm'])}")
        if record.get("learning_rate") is not None:
            parts.append(f"lr {record['learning_rate']:.2e}")
        if record.get("tokens_per_second"):
            parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        parts.append(_seconds_of_step(record))
        device, host = record.get("device_peak_bytes"), record.get("host_peak_bytes")
        parts.append(f"device {bytes_text(device or 0)}, host {bytes_text(host or 0)}")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"{seconds_text(left)} left")
        return "  ".join(parts)

    # The panel ------------------------------------------------------------------------------------

    def _panel(self) -> RenderableType:
        try:
            return Panel(Group(*self._rows()), title="oomb", title_align="left", padding=(0, 1))
        except Exception as error:  # drawn on rich's thread, where nobody would catch it
            return f"(no display: {error!r})"

    def _rows(self) -> list[RenderableType]:
        record, progress = self._step, self._progress
        total = self._info.get("max_steps")
        bars = Table.grid(padding=(0, 2))
        done = int(record.get("step") or (self._first_step or 1) - 1)
        left = self._seconds_left()
        bars.add_row(
            f"step {max(self._at, done)}" + (f" of {total}" if total else ""),
            ProgressBar(total=total or 1, completed=done if total else 0, width=36),
            "" if left is None else f"{seconds_text(left)} left",
        )
        if progress is not None:
            bars.add_row(
                f"{progress.phase}, {_chunks_done(progress)} of {progress.num_chunks} chunks",
                ProgressBar(total=progress.num_chunks, completed=_chunks_done(progress), width=36),
                f"{seconds_text(progress.seconds)} in this call",
            )
        figures = Table.grid(padding=(0, 2))
        for name, text in (*self._training(), *self._memory()):
            figures.add_row(f"[dim]{name}[/dim]", text)
        return [bars, "", figures]

    def _training(self) -> list[tuple[str, str]]:
        record = self._step
        rows = []
        if record:
            loss = _number(record.get("loss"))
            if self._eval:
                loss += f"   evaluation {_number(self._eval.get('loss'))}"
                of_set = f"{escape(set_name(self._eval))}, " if set_name(self._eval) else ""
                loss += f" ({of_set}step {self._eval.get('step')})"
            rows.append(("loss", loss))
            norm, rate = record.get("grad_norm"), record.get("learning_rate")
            if norm is not None:
                rows.append(("gradient norm", _number(norm)))
            if rate is not None:
                rows.append(("learning rate", _number(rate, ".2e")))
            rows.append(("speed", f"{record.get('tokens_per_second') or 0:,.0f} tokens/s"))
            rows.append(("last step", _seconds_of_step(record)))
        return rows

    def _memory(self) -> list[tuple[str, str]]:
        now, record, chunk = self._progress, self._step, self._chunk
        device = now.device_bytes if now else 0
        host = now.host_bytes if now else 0
        rows = [
            ("device tier", _tier(device, record.get("device_peak_bytes"))),
            ("host tier", _tier(host, record.get("host_peak_bytes"))),
        ]
        if chunk and chunk["seconds"] > 0:
            h2d, d2h = (chunk[name] / chunk["seconds"] for name in ("h2d_bytes", "d2h_bytes"))
            rows.append(("to device, to host", f"{rate_text(h2d)}, {rate_text(d2h)}"))
        waited = now.exposed_copy_seconds if now else record.get("exposed_copy_seconds")
        if waited is not None:
            rows.append(("waited for copies", seconds_text(waited)))
        return rows

    def _seconds_left(self) -> float | None:
        """From the mean over this process's steps, evaluations and saves included."""
        if not self._info.get("max_steps") or not self._step or self._first_step is None:
            return None
        total, done = int(self._info["max_steps"]), int(self._step["step"])
        if done >= total:
            return None
        mean = (time.monotonic() - self._began) / (done - self._first_step + 1)
        return mean * (total - done)


def _title(info: Record) -> str:
    parts = [str(info.get("model") or "model")]
    number, trainable = info.get("num_parameters"), info.get("trainable_parameters")
    if number:
        parts.append(f"{count_text(number)} parameters")
    if trainable and trainable != number:
        parts.append(f"{count_text(trainable)} trained")
    if info.get("context"):
        parts.append(f"{info['context']:,} tokens")
    if info.get("resumed_from_step") is not None:
        parts.append(f"resumed from step {info['resumed_from_step']}")
    return ", ".join(parts)


def _chunks_done(progress: Progress) -> int:
    if progress.phase == "fill":
        return progress.chunk + 1
    return progress.num_chunks - progress.chunk


def _tier(now: int, peak: int | None) -> str:
    return bytes_text(now) + (f"   peak {bytes_text(peak)}" if peak else "")


def _seconds_of_step(record: Record) -> str:
    seconds = record.get("seconds") or 0.0
    parts = [
        f"{name} {seconds_text(record[key])}"
        for name, key in (
            ("fill", "fill_seconds"),
            ("sweep", "sweep_seconds"),
            ("copies waited for", "exposed_copy_seconds"),
            ("weights waited for", "exposed_weight_seconds"),
            ("host memory waited for", "exposed_growth_seconds"),
        )
        if (record.get(key) or 0.0) > 1e-3 * seconds
    ]
    text = seconds_text(seconds)
    return f"{text} ({', '.join(parts)})" if parts else text


def _number(value: float | None, form: str = ".4f") -> str:
    return "not finite" if value is None else format(float(value), form)
