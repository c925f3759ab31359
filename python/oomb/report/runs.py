"""A run's folder, read for a report."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from oomb.monitor.metrics import METRICS_FILE, Metrics, not_finite, read_metrics, set_name
from oomb.monitor.observer import Record
from oomb.units import parse_size

_OF_A_CHUNK = (
    "seconds",
    "exposed_copy_seconds",
    "device_bytes",
    "host_bytes",
    "h2d_bytes",
    "d2h_bytes",
)


@dataclass(frozen=True)
class Run:
    """What a folder tells about its run. Records may be another program's.

    Chunks, maps and ranks that lack something are left out; a figure that is no number is refused.

    Attributes:
        name: what it is called on the page.
        settings: text of ``run.yaml``, None where there is none.
        plan: ``plan.json``, None where there is none.
    """

    folder: Path
    name: str
    metrics: Metrics
    settings: str | None
    plan: dict[str, Any] | None

    @property
    def steps(self) -> list[float]:
        return [float(r["step"]) for r in self.metrics.steps]

    def column(self, key: str) -> list[float | None]:
        """A number of each step; None where it was not finite or not recorded.

        Raises:
            ValueError: it is no number.
        """
        return [self._number(record, key) for record in self.metrics.steps]

    def has(self, key: str) -> bool:
        """Whether any step recorded it."""
        return any(value is not None for value in self.column(key))

    def tier_limit(self, tier: str) -> int | None:
        """Bytes that the ``"device"`` or ``"host"`` tier was given; None where nothing was set."""
        config = self.metrics.start.get("config")
        given = config.get(f"{tier}_memory") if isinstance(config, dict) else None
        try:
            return parse_size(tier, given)
        except (TypeError, ValueError):
            return None

    def most(self, key: str) -> float | None:
        return max((v for v in self.column(key) if v is not None), default=None)

    def total(self, key: str) -> float:
        return sum(v for v in self.column(key) if v is not None)

    def median(self, key: str) -> float | None:
        """Median of the steps behind the first, which also compiles and allocates."""
        values = [v for v in self.column(key) if v is not None]
        return statistics.median(values[1:] or values) if values else None

    def evaluations(self) -> dict[str, list[Record]]:
        """Records by the name of the set; empty for one without a name.

        Raises:
            ValueError: a loss is no number.
        """
        sets: dict[str, list[Record]] = {}
        for record in self.metrics.evals:
            self._number(record, "loss")
            sets.setdefault(set_name(record), []).append(record)
        return sets

    def main_set(self) -> str | None:
        """Name of the set that the best model is chosen by, else of the first; None: no set."""
        names = list(self.evaluations())
        metric = str(self.metrics.start.get("metric_for_best_model") or "")
        if not metric.startswith("eval_"):
            metric = f"eval_{metric}"
        asked = [name for name in names if metric.startswith(f"{name or 'eval'}_")]
        return max(asked, key=len, default=names[0] if names else None)

    def chunks_of_a_step(self) -> tuple[int, list[Record]] | None:
        """The last finished step whose chunks were recorded: (step, records)."""
        finished = {r["step"] for r in self.metrics.steps}
        return _last(
            {step: r for step, r in self.metrics.chunks.items() if step in finished}, _whole_chunk
        )

    def maps_of_a_step(self) -> tuple[int, list[Record]] | None:
        """The last step whose selections were recorded: (step, records)."""
        return _last(self.metrics.selections, _whole_map)

    def steps_of_ranks(self) -> list[Record]:
        """Steps of as many ranks as the last has, with the seconds of each; none of one process.

        Of steps before a resume with another number of ranks nothing is told.
        """
        ranks = self.metrics.steps[-1].get("ranks")
        if not isinstance(ranks, int) or ranks < 2:
            return []
        keys = ("seconds_by_rank", "exchange_seconds_by_rank")
        return [
            step
            for step in self.metrics.steps
            if step.get("ranks") == ranks
            and all(_are_numbers(step.get(key)) and len(step[key]) == ranks for key in keys)
        ]

    def _number(self, record: Record, key: str) -> float | None:
        value = record.get(key)
        if value is None or is_number(value):
            return value
        of = f"{self.folder / METRICS_FILE}, {record['event']} {record['step']}"
        raise ValueError(f"{of}: {key}: expected a number, got {value!r}")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be told with a unit: JSON also has ``1e999``."""
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def _whole_chunk(record: Record) -> bool:
    numbers = [record.get(key) for key in _OF_A_CHUNK]
    return isinstance(record.get("phase"), str) and _are_numbers(numbers)


def _whole_map(record: Record) -> bool:
    rows = record.get("read")
    if not isinstance(rows, list) or not is_number(record.get("layer")):
        return False
    return all(_are_numbers(row) and len(row) <= len(rows) for row in rows)


def _last(
    records: dict[int, list[Record]], whole: Callable[[Record], bool]
) -> tuple[int, list[Record]] | None:
    """The last step all of whose records are whole."""
    steps = (step for step in sorted(records, reverse=True) if all(map(whole, records[step])))
    return next(((step, records[step]) for step in steps), None)


def read_run(folder: str | Path, argument: str = "run") -> Run:
    """Read a run's folder.

    Args:
        argument: what the folder was given as, for errors.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: its metrics or plan cannot be read, or no step is recorded.
    """
    folder = Path(folder)
    path = folder / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{argument}: expected a folder with {METRICS_FILE}, got {folder}{_runs_in(folder)}"
        )
    metrics = read_metrics(path)
    if not metrics.steps:
        raise ValueError(f"{argument}: expected at least one finished step in {path}, got none")
    settings, plan = folder / "run.yaml", folder / "plan.json"
    return Run(
        folder=folder,
        name=folder.resolve().name,
        metrics=metrics,
        # It is shown as it is; a letter of another encoding is no reason against the rest.
        settings=settings.read_text("utf-8", "replace") if settings.is_file() else None,
        plan=_plan(plan) if plan.is_file() else None,
    )


def told_apart(run: Run, other: Run) -> list[Run]:
    """Both, by as much of their paths as tells one from the other.

    Raises:
        ValueError: they are the same.
    """
    paths = [one.folder.resolve() for one in (run, other)]
    if paths[0] == paths[1]:
        raise ValueError(f"compare: expected another run, got {other.folder} again")
    names = [path.parts[-1:] for path in paths]
    while names[0] == names[1]:
        length = len(names[0]) + 1
        names = [path.parts[-length:] for path in paths]
    return [replace(one, name="/".join(n)) for one, n in zip((run, other), names, strict=True)]


def _runs_in(folder: Path) -> str:
    """Names the runs of a folder that holds several."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
    return f", which holds the runs {', '.join(names)}" if names else ""


def _plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_bytes(), parse_constant=not_finite)
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object: {error}") from None
    if not isinstance(plan, dict):
        raise ValueError(f"{path}: expected a JSON object")
    for name in ("predicted", "measured"):
        if not isinstance(plan.get(name) or {}, dict):
            raise ValueError(f"{path}: {name}: expected a JSON object, got {plan[name]!r}")
    return plan
