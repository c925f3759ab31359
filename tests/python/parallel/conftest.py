"""Processes that several tests share, since starting them takes longer than the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .world import World


class _Shared:
    """Four ranks, until a test leaves them with something to answer."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._world: World | None = None

    def clean(self) -> World:
        if self._world is None or not self._world.is_clean:
            self.close()
            self._world = self._stack.enter_context(World(4))
        return self._world

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[_Shared]:
    shared = _Shared()
    yield shared
    shared.close()


@pytest.fixture
def world(shared_ranks: _Shared) -> World:
    """Four ranks; new ones after a test in which one failed, died or hung."""
    return shared_ranks.clean()
