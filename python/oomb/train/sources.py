"""Where documents come from: files, folders, patterns, and data sets of the hub."""

from __future__ import annotations

import csv
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomb.callers import warn_caller
from oomb.nearest import nearest
from oomb.parallel.job import is_first
from oomb.train.errors import BadInput
from oomb.train.json_rows import json_rows
from oomb.train.settings import HubSettings

_TABLES = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
_PROSE = "txt text md rst tex org log html htm xml srt"
_CODE = (
    "py pyi c h cc cpp cxx hpp cu cuh java kt scala js jsx ts tsx css go rs rb php pl lua r jl m "
    "swift cs fs hs ml ex erl clj lisp sh sql v vhd toml yaml yml ini cfg cmake"
)
_TEXTS = {"", *(f".{name}" for name in f"{_PROSE} {_CODE}".split())}
_NAMES = {"jsonl": "JSONL", "parquet": "Parquet", "arrow": "Arrow", "csv": "CSV"}
_NAMED = 5  # sources in a message
_BATCH = 100  # rows of a Parquet file that are read at once
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A file, or a split of a data set on the hub.

    Attributes:
        format: ``text``, ``jsonl``, ``parquet``, ``arrow``, ``csv`` or ``hub``.
        identity: changes when its content does, so that a changed file is read anew.
        hub: of a data set of the hub.
    """

    path: str
    format: str
    identity: tuple[int, int] | str
    hub: HubSettings | None = None

    @property
    def name(self) -> str:
        return self.path if self.hub is None else f"{self.path}, split {self.hub.split!r}"


def find_sources(
    field: str, entries: Iterable[str | HubSettings], format: str = "auto"
) -> list[Source]:
    """What a setting names, in its order, the files of each folder by name.

    A table without a row is left out, with a warning, where others have some.

    Raises:
        BadInput: a path leads to no file, to one that cannot be read or whose suffix says nothing;
            nothing stands in any; a data set that is neither on the hub nor in its cache.
    """
    sources: list[Source] = []
    empty: list[Source] = []
    for entry in entries:
        if isinstance(entry, str) and not _is_hub_name(entry):
            files = [_file(field, file, format) for file in _files(field, entry, format)]
            sources += files
            empty += [file for file in files if file.format != "text" and not _has_rows(file)]
            continue
        hub = HubSettings(dataset=entry) if isinstance(entry, str) else entry
        found = _load_from_hub(field, hub)
        sources.append(Source(hub.dataset, "hub", found._fingerprint, hub))
        if len(found) == 0:
            empty.append(sources[-1])
    filled = [source for source in sources if source not in empty]
    if not filled:
        raise BadInput(f"{field}: expected at least one row, got none in {_some(sources)}")
    if not any(map(_has_bytes, filled)):
        raise BadInput(f"{field}: expected text, got empty files: {_some(sources)}")
    if empty and is_first():
        warn_caller(f"{field}: expected rows in each table, got none in {_some(empty)}; left out")
    return filled


def rows(source: Source) -> Iterator[dict[str, Any]]:
    """Rows of a table, by column.

    Raises:
        BadInput: it is not what its suffix says.
    """
    import datasets  # heavy, and optional

    if source.format == "csv":
        yield from _csv_rows(source)
        return
    try:
        if source.hub is not None:
            yield from _load_from_hub("data", source.hub)
            return
        if source.format == "jsonl":
            yield from json_rows(source.path)
            return
        # A size of its own: that of the first group of rows, the default, may be nothing.
        sizes = {"batch_size": _BATCH} if source.format == "parquet" else {}
        # Streaming: rows go into one cache only, that of their tokens.
        yield from datasets.load_dataset(
            source.format,
            data_files=glob.escape(source.path),  # a name, whatever stands in it
            split="train",
            streaming=True,
            **sizes,
        )
    except (GeneratorExit, BadInput):
        raise
    except Exception as error:  # datasets raises what its readers raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        name = _NAMES.get(source.format, "rows")
        raise BadInput(f"data: expected {name}, got {source.name}: {reason}") from error


def _csv_rows(source: Source) -> Iterator[dict[str, Any]]:
    """Every value as text, which is what CSV has."""
    csv.field_size_limit(sys.maxsize)
    separator = "\t" if source.path.lower().endswith(".tsv") else ","
    try:
        with open(source.path, encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter=separator, strict=True)
            for number, row in enumerate(reader):
                if None in row or None in row.values():
                    raise csv.Error(f"row {number} has not as many columns as the first line")
                yield row
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
        raise BadInput(f"data: expected CSV, got {source.path}: {reason}") from error


def _is_hub_name(entry: str) -> bool:
    """``organisation/name`` where nothing here is meant."""
    place = Path(entry).expanduser()
    named = _HUB_NAME.fullmatch(entry) is not None and not entry.startswith((".", "~"))
    known = place.suffix in _TABLES.keys() | _TEXTS - {""}
    return named and not known and not place.exists() and not place.parent.is_dir()


def _load_from_hub(field: str, hub: HubSettings) -> Any:
    """A split in the cache of Hugging Face datasets, where it is put first if need be."""
    import datasets  # heavy, and optional

    try:
        return datasets.load_dataset(
            hub.dataset, hub.subset, split=hub.split, revision=hub.revision
        )
    except Exception as error:  # of datasets, of the hub, and of the network below both
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:300] if lines else type(error).__name__
        raise BadInput(
            f"{field}: expected a file, a folder, a pattern or a data set of the hub, got "
            f"{hub.dataset!r}, which is no path here and was not read from the hub: {reason}"
        ) from error


def _file(field: str, file: Path, format: str) -> Source:
    found = format if format != "auto" else _TABLES.get(file.suffix.lower())
    if found is None and file.suffix.lower() in _TEXTS:
        found = "text"
    if found is None:
        tables = ", ".join(_TABLES)
        raise BadInput(
            f"{field}: expected a table ({tables}) or text by its suffix, got {file}; "
            "data.format=text reads any file as text, a pattern such as books/**/*.txt chooses some"
        )
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise BadInput(f"{field}: expected a file, got {file}: {error.strerror}") from error
    return Source(str(file), found, (status.st_size, status.st_mtime_ns))


def _has_rows(source: Source) -> bool:
    return _has_bytes(source) and next(rows(source), None) is not None


def _some(sources: Sequence[Source]) -> str:
    more = ", …" if len(sources) > _NAMED else ""
    return ", ".join(source.name for source in sources[:_NAMED]) + more


def _has_bytes(source: Source) -> bool:
    return isinstance(source.identity, str) or source.identity[0] > 0


def _below(folder: Path, above: set[Path]) -> Iterator[Path]:
    """Files of a folder and of those in it, also of linked ones; none that are hidden.

    Args:
        above: folders that lead here, by which a link leads round in a circle.
    """
    own = folder.resolve()
    if own in above:
        return
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _below(path, above | {own})
        elif path.is_file():
            yield path


def _files(field: str, path: str, format: str) -> Sequence[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        try:
            files = sorted(_below(place, set()))
        except OSError as error:
            raise BadInput(f"{field}: expected folders that can be read, got {error}") from error
        if (place / "state.json").is_file():  # saved by datasets: tables, and two files about them
            files = [file for file in files if file.suffix == ".arrow"]
    elif glob.has_magic(path) and not place.exists():
        files = [Path(file) for file in sorted(glob.glob(str(place), recursive=True))]
        files = [file for file in files if file.is_file()]
    else:
        if not place.exists():
            siblings = [file.name for file in place.parent.glob("*")]
            near = nearest(place.name, siblings) if siblings else ""
            raise BadInput(f"{field}: expected a file, got {path}, which does not exist{near}")
        files = [place]
    if not files:
        raise BadInput(f"{field}: expected files, got {path}, which leads to none")
    return files
