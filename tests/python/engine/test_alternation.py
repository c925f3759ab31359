"""Two pieces of work in strict turns."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from greenlet import GreenletExit, getcurrent

from oomb.core.alternation import Alternation


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


def test_an_error_after_the_first_has_ended() -> None:
    turns, seen = Alternation(), list[str]()
    with pytest.raises(ValueError, match="b2"):
        turns.run(worker(turns, seen, "a", 1), worker(turns, seen, "b", 3, 2))
    assert " ".join(seen) == "a0 b0 b1"


@pytest.mark.parametrize("fails", ["a", "b"])
def test_an_error_leaves_the_contexts_of_the_other(fails: str) -> None:
    turns, left, held = Alternation(), list[str](), list[object]()

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            held.append(getcurrent())  # so that it does not end for want of references
            try:
                turns.pass_on()
                if name == fails:
                    raise ValueError(name)
                turns.pass_on()
            finally:
                left.append(name)

        return run

    with pytest.raises(ValueError, match=fails):
        turns.run(work("a"), work("b"))
    assert sorted(left) == ["a", "b"]


def test_of_two_errors_the_first_one_is_raised() -> None:
    turns = Alternation()

    def first() -> None:
        turns.pass_on()
        raise ValueError("first")

    def second() -> None:
        try:
            turns.pass_on()
        finally:
            raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        turns.run(first, second)


def test_who_is_ended_does_not_pass_on_any_more() -> None:
    turns, left, held = Alternation(), list[str](), list[object]()

    def first() -> None:
        turns.pass_on()
        raise ValueError("first")

    def second() -> None:
        held.append(getcurrent())
        try:
            turns.pass_on()
        finally:
            turns.pass_on()
            left.append("second")

    with pytest.raises(ValueError, match="first"):
        turns.run(first, second)
    assert left == ["second"]


def test_a_second_that_does_not_come_to_its_end_is_an_error() -> None:
    def quiet() -> None:
        raise GreenletExit  # what a greenlet swallows

    with pytest.raises(RuntimeError, match="did not come to its end"):
        Alternation().run(lambda: None, quiet)


def test_an_error_that_the_first_swallows_is_an_error() -> None:
    turns, seen = Alternation(), list[str]()

    def first() -> None:
        with suppress(ValueError):
            turns.pass_on()

    with pytest.raises(RuntimeError, match="did not come to its end"):
        turns.run(first, worker(turns, seen, "b", 1, 0))


def test_nothing_is_held_afterwards() -> None:
    turns, seen = Alternation(), list[str]()
    turns.run(worker(turns, seen, "a", 2), worker(turns, seen, "b", 2))
    assert set(vars(turns).values()) == {None}


def test_turns_can_be_taken_again_after_an_error() -> None:
    turns, seen = Alternation(), list[str]()
    with pytest.raises(ValueError, match="a1"):
        turns.run(worker(turns, [], "a", 3, 1), worker(turns, [], "b", 3))
    turns.run(worker(turns, seen, "a", 2), worker(turns, seen, "b", 2))
    assert " ".join(seen) == "a0 b0 a1 b1"


def torch_state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
    )


@contextmanager
def autocast(dtype: torch.dtype, *, enabled: bool, cache: bool) -> Iterator[None]:
    """On both devices, whether or not there is a GPU."""
    before = {
        device: (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in ("cpu", "cuda")
    }
    with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=cache):
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", enabled)
        yield
    torch.set_autocast_dtype("cuda", before["cuda"][0])
    torch.set_autocast_enabled("cuda", before["cuda"][1])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("casts", [True, False])
def test_each_keeps_its_grad_mode_and_autocast(grad: bool, casts: bool) -> None:
    turns, seen = Alternation(), dict[str, list[tuple[object, ...]]]()

    def work(name: str, inner: torch.dtype) -> Callable[[], None]:
        def run() -> None:
            states = seen[name] = [torch_state()]
            with (
                torch.set_grad_enabled(not grad),
                autocast(inner, enabled=not casts, cache=False),
            ):
                for _ in range(2):
                    turns.pass_on()
                    states.append(torch_state())
            turns.pass_on()
            states.append(torch_state())

        return run

    with torch.set_grad_enabled(grad), autocast(torch.bfloat16, enabled=casts, cache=True):
        of_caller = torch_state()
        turns.run(work("a", torch.float16), work("b", torch.bfloat16))
        assert torch_state() == of_caller
    for name, inner in (("a", torch.float16), ("b", torch.bfloat16)):
        within = (not grad, not casts, not casts, inner, inner, False)
        assert seen[name] == [of_caller, within, within, of_caller]


def test_an_error_of_the_second_meets_the_first_in_its_own_state() -> None:
    turns, seen = Alternation(), list[tuple[object, ...]]()

    def first() -> None:
        seen.append(torch_state())
        try:
            turns.pass_on()
        except ValueError:
            seen.append(torch_state())
            raise

    def second() -> None:
        torch.set_grad_enabled(False)
        raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        turns.run(first, second)
    assert seen[1] == seen[0]


@pytest.mark.parametrize("fails", [True, False])
def test_the_caller_has_its_state_again(fails: bool) -> None:
    turns = Alternation()

    def first() -> None:
        turns.pass_on()
        if fails:
            raise ValueError("first")

    def second() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.set_grad_enabled(False)
            turns.pass_on()

    before = torch_state()
    with pytest.raises(ValueError, match="first") if fails else nullcontext():
        turns.run(first, second)
    assert torch_state() == before


def test_each_has_its_own_context_variables() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    turns, seen = Alternation(), list[tuple[str, str]]()

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            seen.append((name, variable.get()))
            variable.set(name)
            turns.pass_on()
            seen.append((name, variable.get()))

        return run

    variable.set("caller")
    turns.run(work("a"), work("b"))
    assert seen == [("a", "caller"), ("b", "caller"), ("a", "a"), ("b", "b")]
