"""Two threads in strict turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from oomb.engine.alternation import Alternation


def worker(
    turns: Alternation, seen: list[str], name: str, rounds: int, fail_at: int = -1
) -> Callable[[], None]:
    def work() -> None:
        for index in range(rounds):
            if index == fail_at:
                raise ValueError(f"{name}{index}")
            seen.append(f"{name}{index}")
            turns.pass_on()

    return work


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ((3, 3), "a0 b0 a1 b1 a2 b2"),
        ((3, 2), "a0 b0 a1 b1 a2"),
        ((1, 3), "a0 b0 b1 b2"),
        ((2, 0), "a0 a1"),
        ((0, 2), "b0 b1"),
        ((0, 0), ""),
    ],
)
def test_turns_are_strict(rounds: tuple[int, int], expected: str) -> None:
    turns, seen = Alternation(), list[str]()
    turns.run(worker(turns, seen, "a", rounds[0]), worker(turns, seen, "b", rounds[1]))
    assert " ".join(seen) == expected
    assert threading.active_count() == len(threading.enumerate())
    assert not [t for t in threading.enumerate() if t.name == "oomb fill"]


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (("a", 0), ""),
        (("a", 2), "a0 b0 a1 b1"),
        (("b", 0), "a0"),
        (("b", 1), "a0 b0 a1"),
        (("b", 2), "a0 b0 a1 b1 a2"),
    ],
)
def test_an_error_ends_both(fail: tuple[str, int], expected: str) -> None:
    turns, seen = Alternation(), list[str]()
    first, second = (
        worker(turns, seen, name, 3, fail[1] if fail[0] == name else -1) for name in "ab"
    )
    with pytest.raises(ValueError, match=f"{fail[0]}{fail[1]}"):
        turns.run(first, second)
    assert " ".join(seen) == expected
    assert not [t for t in threading.enumerate() if t.name == "oomb fill"]


def test_an_error_after_the_first_has_ended() -> None:
    turns, seen = Alternation(), list[str]()
    with pytest.raises(ValueError, match="b2"):
        turns.run(worker(turns, seen, "a", 1), worker(turns, seen, "b", 3, 2))
    assert " ".join(seen) == "a0 b0 b1"


def test_the_second_thread_sees_the_callers_state() -> None:
    turns, seen = Alternation(), list[object]()

    def look() -> None:
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_num_threads(),
            )
        )

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        turns.run(look, look)
    assert seen[0] == seen[1]
    assert seen[1][:3] == (False, True, torch.bfloat16)  # type: ignore[index]
    seen.clear()
    turns = Alternation()
    turns.run(look, look)
    assert seen[0] == seen[1]
    assert seen[1][:2] == (True, False)  # type: ignore[index]
