"""A data set made row by row and kept in the cache of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from oomb.train.errors import BadInput

if TYPE_CHECKING:
    from datasets import Dataset, Features

_BATCH = 1000  # rows whose types are told at once


def generated(
    field: str,
    rows: Callable[..., Iterator[dict[str, Any]]],
    arguments: dict[str, Any],
    cache_dir: str | None,
    features: Features | None = None,
) -> Dataset:
    """What ``rows(**arguments)`` gives; the same arguments are not read again.

    Args:
        field: setting that the rows come from.

    Raises:
        BadInput: a row's own complaint, rows that do not go together, or none at all.
    """
    import datasets  # heavy, and optional

    try:
        if next(rows(**arguments), None) is None:  # of which datasets makes no table
            raise BadInput(f"{field}: expected at least one row, got none")
        return datasets.Dataset.from_generator(
            rows, features=features, gen_kwargs=arguments, cache_dir=cache_dir
        )
    except Exception as error:
        reason = reason_of(error, cache_dir)
        if reason is None:
            line = str(error).partition("\n")[0][:300]
            raise BadInput(f"{field}: expected rows that are alike, got: {line}") from error
        raise reason from None


def reason_of(error: BaseException, cache_dir: str | None) -> BadInput | None:
    """What an error of datasets was raised from: a row's own complaint, or that of the disk."""
    import datasets  # heavy, and optional

    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, (BadInput, OSError)):
        reason = reason.__cause__
    if not isinstance(reason, OSError):
        return reason
    place = cache_dir or datasets.config.HF_DATASETS_CACHE
    return BadInput(
        f"data.cache_dir: expected a folder that can take the data, got {place}: {reason}"
    )


def features_of(field: str, rows: Iterable[dict[str, Any]]) -> Features:
    """Columns that hold all rows: those of any, each of a type that takes what every row has.

    Datasets by itself takes them from the first rows, and refuses what comes later.

    Args:
        field: setting that the rows come from.

    Raises:
        BadInput: a row's own complaint, or a column whose values have no type in common.
    """
    import datasets  # heavy, and optional
    import pyarrow  # optional

    left, schema = iter(rows), pyarrow.schema([])
    while batch := list(islice(left, _BATCH)):
        for name in dict.fromkeys(name for row in batch for name in row):
            try:
                column = pyarrow.array([row.get(name) for row in batch])
                found = pyarrow.schema([(name, column.type)])
                schema = pyarrow.unify_schemas([schema, found], promote_options="permissive")
            except (pyarrow.ArrowException, OverflowError) as error:
                line = str(error).partition("\n")[0][:300]
                raise BadInput(
                    f"{field}: expected values of one type in column {name!r}, got: {line}"
                ) from error
    return datasets.Features.from_arrow_schema(schema)
