"""Processes that several tests share, since starting them takes longer than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four ranks."""
    with World(4) as ranks:
        yield ranks
