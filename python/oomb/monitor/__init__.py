"""Seeing a run: records on disk, a live display, and the protocol that a trainer reports to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomb.lazy import lazy_names

if TYPE_CHECKING:
    from oomb.monitor.display import Display
    from oomb.monitor.metrics import METRICS_FILE, Metrics, MetricsWriter, read_metrics
    from oomb.monitor.observer import Record, RunObserver
    from oomb.monitor.run import RunMonitor

__all__ = [
    "METRICS_FILE",
    "Display",
    "Metrics",
    "MetricsWriter",
    "Record",
    "RunMonitor",
    "RunObserver",
    "read_metrics",
]

if not TYPE_CHECKING:  # a checker knows the names, and would take any other one too
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "METRICS_FILE": "oomb.monitor.metrics",
            "Display": "oomb.monitor.display",
            "Metrics": "oomb.monitor.metrics",
            "MetricsWriter": "oomb.monitor.metrics",
            "Record": "oomb.monitor.observer",
            "RunMonitor": "oomb.monitor.run",
            "RunObserver": "oomb.monitor.observer",
            "read_metrics": "oomb.monitor.metrics",
        },
    )
