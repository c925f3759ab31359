"""Time that kernels wait for copies, on visits of which it can be told by hand."""

from __future__ import annotations

import pytest

from oomb.plan.timeline import Visit, waiting_seconds


def waiting(*visits: Visit, latency: float = 0.0, paired: bool = False) -> float:
    """Each visit computes for 10 s; 1 byte/s."""
    return waiting_seconds(visits, lambda _: 10.0, link=1.0, latency=latency, paired=paired)


def test_nothing_to_wait_for() -> None:
    assert waiting(Visit("read", 0, 0, 0, 0), Visit("read", 0, 0, 50, 0)) == 0.0


def test_pages_that_come_ahead() -> None:
    """Loads of 25 s behind a visit of 10 s: the next one waits for the rest."""
    assert waiting(Visit("read", 0, 25, 0, 0), Visit("read", 0, 0, 0, 0)) == pytest.approx(15.0)
    assert waiting(Visit("read", 0, 8, 0, 0), Visit("read", 0, 0, 0, 0)) == 0.0


def test_pages_that_were_missed() -> None:
    """The visit waits for its own, not for those that it loads for others."""
    assert waiting(Visit("read", 0, 9, 0, 4)) == pytest.approx(4.0)
    later = Visit("read", 0, 0, 0, 0)
    assert waiting(Visit("read", 0, 20, 0, 4), later) == pytest.approx(4.0 + 6.0)


def test_stores_make_room() -> None:
    assert waiting(Visit("accumulate", 0, 4, 7, 4)) == pytest.approx(11.0)


def test_another_chunk_hides_the_fetch() -> None:
    visits = [Visit("fill", 0, 0, 0, 0), Visit("fill", 1, 12, 0, 12)]
    assert waiting(*visits, paired=False) == pytest.approx(12.0)
    assert waiting(*visits, paired=True) == pytest.approx(2.0)


def test_latency() -> None:
    visits = [Visit("read", 0, 1, 0, 0), Visit("read", 0, 0, 0, 0), Visit("read", 0, 0, 0, 0)]
    assert waiting(*visits, latency=0.5) == pytest.approx(1.0)
