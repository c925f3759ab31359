"""Records of a run on disk: one JSON object per line, appended and never rewritten."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomb.monitor.observer import Record

_OF_A_STEP = ("step", "eval", "save", "chunk", "selection")
METRICS_FILE = "metrics.jsonl"  # in a run's folder


class MetricsWriter:
    """Appends records to a file, each in one write.

    A line that an earlier process did not finish is cut off when the file is opened, and one that
    the disk did not take whole is taken back. A record that comes after ``close`` opens the file
    again.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = self._opened()

    def write(self, event: str, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that are not finite become null, as JSON has no word for them.

        Raises:
            OSError: the disk did not take it; the file is as before.
        """
        if self._file is None:  # an evaluation after training, or another training
            self._file = self._opened()
        record = {"event": event, "time": time.time(), **record}
        line = json.dumps(in_json(record), allow_nan=False).encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(f"{self.path}: the disk is full")
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def _opened(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_torn_line(file)
        return file

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Metrics:
    """Records of a run that hold: those that a resume superseded are left out.

    Attributes:
        start: of the last process that worked on the run; empty where there is none.
        steps, saves: one record per step, ascending.
        evals: one record per step and name of an evaluation set, by ascending steps.
        chunks: by step, in the order of the chunks.
        selections: by step.
        end: None while the run goes on, or where it was killed.
    """

    start: Record = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    saves: list[Record] = field(default_factory=list)
    chunks: dict[int, list[Record]] = field(default_factory=dict)
    selections: dict[int, list[Record]] = field(default_factory=dict)
    end: Record | None = None


def read_metrics(path: str | Path) -> Metrics:
    """The records of a file that :class:`MetricsWriter` wrote; a torn last line is left out.

    A process that resumed from step s supersedes what was recorded of later steps; one that
    started afresh supersedes everything.

    Raises:
        ValueError: a line that is not the last is no record.
    """
    records: list[Record] = []
    for record in _records(Path(path)):
        if record["event"] == "start":
            resumed = record.get("resumed_from_step")
            records = [r for r in records if resumed is not None and r.get("step", 0) <= resumed]
            records = [r for r in records if r["event"] not in ("start", "end")]
        records.append(record)
    of_event: dict[str, list[Record]] = {}
    for record in records:
        of_event.setdefault(record["event"], []).append(record)
    return Metrics(
        start=next(iter(of_event.get("start", [])), {}),
        steps=_last_of_each_step(of_event.get("step", [])),
        evals=_last_of_each_set(of_event.get("eval", [])),
        saves=_last_of_each_step(of_event.get("save", [])),
        chunks=_by_step(of_event.get("chunk", [])),
        selections=_by_step(of_event.get("selection", [])),
        end=of_event["end"][-1] if "end" in of_event else None,
    )


def _records(path: Path) -> list[Record]:
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # behind the last newline: a torn line
        try:
            record = json.loads(line, parse_constant=not_finite)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            raise ValueError(f"{path}, line {number}: expected a JSON object with an event")
        if record["event"] in _OF_A_STEP and not isinstance(record.get("step"), int):
            got = record.get("step")
            raise ValueError(f"{path}, line {number}: step: expected an int, got {got!r}")
        resumed = record.get("resumed_from_step")
        if record["event"] == "start" and not (resumed is None or isinstance(resumed, int)):
            what = f"resumed_from_step: expected an int, got {resumed!r}"
            raise ValueError(f"{path}, line {number}: {what}")
        records.append(record)
    return records


def not_finite(_: str) -> None:
    """NaN and Infinity, which other programs may write, mean what null means in our records."""


def _last_of_each_step(records: Sequence[Record]) -> list[Record]:
    return [record for _, record in sorted({r["step"]: r for r in records}.items())]


def _last_of_each_set(records: Sequence[Record]) -> list[Record]:
    """Of each step; sets of a step in the order in which they were evaluated."""
    last = {(record["step"], set_name(record)): record for record in records}
    return sorted(last.values(), key=lambda record: record["step"])


def set_name(record: Record) -> str:
    """Of the evaluation set that a record is about; empty where there is one without a name."""
    return str(record.get("name") or "")


def _by_step(records: Sequence[Record]) -> dict[int, list[Record]]:
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record["step"], []).append(record)
    return groups


def _cut_torn_line(file: int) -> None:
    end = size = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(file, end)


def in_json(value: Any) -> Any:
    """A value in JSON's types; a dataclass with its name as ``type``."""
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return in_json({"type": type(value).__name__, **fields})
    if isinstance(value, Mapping):
        return {str(key): in_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(item) for item in value]
    return str(value)
