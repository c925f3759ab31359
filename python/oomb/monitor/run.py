"""A run's observer: metrics on disk and the display, together."""

from __future__ import annotations

import warnings
from pathlib import Path

from oomb.monitor.display import Display
from oomb.monitor.metrics import METRICS_FILE, MetricsWriter
from oomb.monitor.observer import Record, RunObserver
from oomb.monitor.selection_map import selection_maps
from oomb.monitor.traffic import ChunkClock
from oomb.results import Progress, Selection


class RunMonitor:
    """Writes ``RUN/metrics.jsonl`` and drives a display. Neither ever breaks the run.

    Args:
        run_dir: folder of the run.
        display: another observer beside the file; None: a :class:`Display`, False: none.
        chunk_records_every: steps between two whose chunks and selections are recorded (the memory
            timeline and the page map of a report); the first step of a process always is.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        display: RunObserver | bool | None = None,
        chunk_records_every: int = 100,
    ) -> None:
        if chunk_records_every < 1:
            raise ValueError(
                f"chunk_records_every: expected an int >= 1, got {chunk_records_every}"
            )
        self._writer = MetricsWriter(Path(run_dir) / METRICS_FILE)
        if display is None or display is True:
            display = Display()
        self._display: RunObserver | None = display or None
        self._every = chunk_records_every
        self._chunked_step: int | None = None  # last step whose chunks are recorded
        self._mapped_step: int | None = None
        self._page_size = 0
        self._chunk_size = 0
        self._clock = ChunkClock()
        self._warned = False

    def on_start(self, info: Record) -> None:
        config = info.get("config") or {}
        read = config.get if isinstance(config, dict) else lambda name: getattr(config, name)
        self._page_size, self._chunk_size = read("page_size") or 0, read("chunk_size") or 0
        self._write("start", {"resumed_from_step": None, **info})
        self._show("on_start", info)

    def on_progress(self, step: int, progress: Progress) -> None:
        if self._records(step):
            chunk = self._clock.chunk(progress)
            self._write("chunk", {"step": step, **chunk})
        self._show("on_progress", step, progress)

    def on_selection(self, step: int, selection: Selection) -> None:
        if self._records(step) and selection and self._page_size and step != self._mapped_step:
            self._mapped_step = step  # of a step's micro-batches the first is enough
            for record in selection_maps(selection, self._chunk_size, self._page_size):
                self._write("selection", {"step": step, **record})
        self._show("on_selection", step, selection)

    def on_step(self, record: Record) -> None:
        self._write("step", record)
        self._show("on_step", record)

    def on_eval(self, record: Record) -> None:
        self._write("eval", record)
        self._show("on_eval", record)

    def on_save(self, record: Record) -> None:
        self._write("save", record)
        self._show("on_save", record)

    def on_end(self, record: Record) -> None:
        self._write("end", record)
        self._show("on_end", record)
        self._writer.close()

    def _records(self, step: int) -> bool:
        if self._chunked_step is None or step >= self._chunked_step + self._every:
            self._chunked_step = step
        return step == self._chunked_step

    def _write(self, event: str, record: Record) -> None:
        try:
            self._writer.write(event, record)
        except (OSError, ValueError) as error:
            if not self._warned:
                warnings.warn(f"metrics are not recorded: {error}", stacklevel=3)
            self._warned = True

    def _show(self, method: str, *arguments: object) -> None:
        if self._display is None:
            return
        try:
            getattr(self._display, method)(*arguments)
        except Exception as error:  # whatever a terminal does, training goes on
            self._display = None
            warnings.warn(f"the display stopped: {error!r}", stacklevel=3)
