"""Items in order, as many at a time as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def neighbours_within(most: int, items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Neighbours whose sizes are together at most ``most``, or one that is larger."""
    part: list[T] = []
    filled = 0
    for item in items:
        if part and filled + size(item) > most:
            yield part
            part, filled = [], 0
        part.append(item)
        filled += size(item)
    if part:
        yield part
