"""A data set made row by row and kept in the cache of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oomb.train.errors import BadInput

if TYPE_CHECKING:
    from datasets import Dataset, Features


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
        BadInput: a row's own complaint, or rows that do not go together.
    """
    import datasets  # heavy, and optional

    try:
        return datasets.Dataset.from_generator(
            rows, features=features, gen_kwargs=arguments, cache_dir=cache_dir
        )
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, BadInput):
            reason = reason.__cause__
        if reason is None:
            line = str(error).partition("\n")[0][:300]
            raise BadInput(f"{field}: expected rows that are alike, got: {line}") from error
        raise reason from None
