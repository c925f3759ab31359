"""Seeing a run: records on disk, a live display, and the protocol that a trainer reports to."""

from oomb.monitor.display import Display
from oomb.monitor.metrics import Metrics, MetricsWriter, read_metrics
from oomb.monitor.observer import Record, RunObserver
from oomb.monitor.run import METRICS_FILE, RunMonitor

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
