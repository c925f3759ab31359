"""Shared fixtures: seeds, and skipping of GPU tests where there is no GPU."""

from __future__ import annotations

import signal

import pytest
import torch


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored; tests that send it want the usual handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
