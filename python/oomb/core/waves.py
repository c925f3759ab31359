"""How the past of a visit is parted into launches, and held in the device tier meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from oomb.core.call_pages import CallPages

Wave = tuple[int, int]  # logical pages [begin, end)


@dataclass(frozen=True)
class Launch:
    """One kernel of a visit: pages of a wave, None: of none; the first has the own chunk too."""

    pages: Wave | None
    first: bool
    last: bool

    @property
    def arguments(self) -> dict[str, Any]:
        begin, end = self.pages or (0, 0)
        return {
            "page_begin": begin,
            "page_end": end,
            "own_chunk": self.first,
            "first_wave": self.first,
            "last_wave": self.last,
        }


def launches(pages: CallPages, visit: int) -> list[Launch]:
    """The kernels of a visit: its waves, the chunk's own keys in front of the first.

    They get a launch of their own where pages of that wave have to be fetched first. How a visit is
    parted changes no bit.

    Args:
        visit: row of the call's order; negative: no past is read.
    """
    waves = [] if visit < 0 else pages.manager.waves(visit)
    parts: list[Wave | None] = list(waves)
    if not waves or own_alone(pages, visit, waves[0]):
        parts.insert(0, None)
    return [
        Launch(part, first=index == 0, last=index == len(parts) - 1)
        for index, part in enumerate(parts)
    ]


def own_alone(pages: CallPages, visit: int, wave: Wave) -> bool:
    """Whether a chunk's own keys get a launch of their own before a wave."""
    return pages.spilled and pages.manager.own_alone(visit, *wave)


@contextmanager
def resident(pages: CallPages, visit: int, wave: Wave | None) -> Iterator[None]:
    """Hold a wave's pages in the device tier while kernels use them."""
    if wave is None:
        yield
        return
    stream = pages.stream
    pages.growing(partial(pages.manager.acquire, visit, *wave, stream))
    try:
        yield
    finally:
        pages.manager.release(visit, *wave, stream)
