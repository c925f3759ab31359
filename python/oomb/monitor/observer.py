"""What a trainer tells about its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from oomb.results import Progress, Selection

Record = dict[str, Any]  # one event; docs/report.md lists the keys of each kind


class RunObserver(Protocol):
    """Receives the events of a run, in order, on the training thread."""

    def on_start(self, info: Record) -> None:
        """The run begins, or goes on from a checkpoint."""

    def on_progress(self, step: int, progress: Progress) -> None:
        """A chunk of optimizer step ``step`` is done; give it to ``on_progress`` of the engine."""

    def on_selection(self, step: int, selection: Selection) -> None:
        """Pages read in ``step``: ``step.selection`` under ``Config(record_selection=True)``."""

    def on_step(self, record: Record) -> None:
        """An optimizer step is done."""

    def on_eval(self, record: Record) -> None:
        """An evaluation is done."""

    def on_save(self, record: Record) -> None:
        """A checkpoint is on disk."""

    def on_end(self, record: Record) -> None:
        """The run is over; nothing follows."""
