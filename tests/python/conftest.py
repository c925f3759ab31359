"""What all tests share: a seed, no GPU tests without a GPU, some of the many cases of a test."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from statistics import mean

import pytest
import torch


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored; tests that send it want the usual handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_to_the_release(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _leave_to_the_release(items: list[pytest.Item]) -> None:
    """Mark cases of tests that are ``sampled`` beyond so many; of slow ones beyond ``slow``."""
    tests: dict[str, tuple[list[pytest.Item], list[pytest.Item]]] = defaultdict(lambda: ([], []))
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("release"):
            is_slow = item.get_closest_marker("slow") is not None
            tests[item.nodeid.partition("[")[0]][is_slow].append(item)
    for quick_and_slow in tests.values():
        seen: Counter[str] = Counter()  # slow ones rather show what quick ones do not
        for is_slow, cases in enumerate(quick_and_slow):
            for item in _not_sampled(cases, bool(is_slow), seen):
                item.add_marker("slow")
                item.add_marker("release")


def _not_sampled(cases: list[pytest.Item], is_slow: bool, seen: Counter[str]) -> list[pytest.Item]:
    """All but so many, whose names have the words that were seen least."""
    if not cases:
        return []
    left, marker = list(cases), cases[0].get_closest_marker("sampled")
    assert marker is not None
    count = marker.kwargs.get("slow", marker.args[0]) if is_slow else marker.args[0]
    for _ in range(min(count, len(cases))):
        rarest = min(left, key=lambda item: _times(item, seen))
        seen.update(_words(rarest))
        left.remove(rarest)
    return left


def _times(item: pytest.Item, seen: Counter[str]) -> tuple[int, float]:
    """How often the word of an item that was seen least was seen, and its words on average."""
    times = [seen[word] for word in _words(item)]
    return min(times), mean(times)


def _words(item: pytest.Item) -> list[str]:
    return item.name.partition("[")[2].rstrip("]").split("-")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
