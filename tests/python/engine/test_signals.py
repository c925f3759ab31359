"""Signals come before or after the lines that must not be torn apart, whoever handles them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import oomb
from oomb.core.tiers import free_memory
from oomb.held_signals import with_signals_held
from oomb.hf.interrupt import SignalWatch
from oomb.model.swap import Swaps, as_before_afterwards

from .models import make
from .reference import random_ids

IDS = random_ids(1, 40)


class Handled(Exception):
    """Raised by a handler of a signal, as a time limit does."""


@pytest.fixture
def handler() -> Iterator[Callable[..., None]]:
    def handle(number: int, frame: object) -> None:
        raise Handled

    before = signal.signal(signal.SIGALRM, handle)
    yield handle
    signal.signal(signal.SIGALRM, before)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_a_signal_waits_for_the_end(handler: Callable[..., None]) -> None:
    done = []

    def work() -> None:
        send(signal.SIGALRM)
        done.append(1)

    with pytest.raises(Handled):
        with_signals_held(work)
    assert done
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_signal_is_not_lost_where_the_work_fails(handler: Callable[..., None]) -> None:
    def work() -> None:
        send(signal.SIGALRM)
        raise ValueError

    with pytest.raises(Handled) as caught:
        with_signals_held(work)
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_each_of_several_signals_is_handled(handler: Callable[..., None]) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with pytest.raises(Handled):
            with_signals_held(lambda: send(signal.SIGALRM, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_outside_the_main_thread_there_is_nothing_to_hold() -> None:
    done: list[int] = []
    thread = threading.Thread(target=with_signals_held, args=(lambda: done.append(1),))
    thread.start()
    thread.join()
    assert done


def test_what_was_replaced_is_put_back_before_signals_that_come_meanwhile(
    handler: Callable[..., None],
) -> None:
    """Several come while all is put back: none of them keeps it from that."""
    items = {"a": 1, "b": 2}

    def work() -> None:
        swaps = Swaps()
        with swaps:
            swaps.replace_item(items, "a", 7)
            swaps.afterwards(lambda: send(signal.SIGALRM, signal.SIGINT))
            swaps.replace_item(items, "new", 7)
            raise ValueError

    with pytest.raises((Handled, KeyboardInterrupt)):
        as_before_afterwards(work)
    assert items == {"a": 1, "b": 2}


def test_an_error_of_one_undoing_keeps_none_of_the_others() -> None:
    items = {"a": 1, "b": 2}

    def begin(swaps: Swaps) -> None:
        swaps.replace_item(items, "a", 7)
        swaps.afterwards(lambda: 1 / 0)
        swaps.replace_item(items, "b", 7)

    with pytest.raises(ZeroDivisionError), Swaps(begin):
        assert items == {"a": 7, "b": 7}
    assert items == {"a": 1, "b": 2}


def test_an_undoing_that_is_interrupted_is_done_again() -> None:
    seen: list[int] = []

    def undo() -> None:
        seen.append(1)
        if len(seen) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Swaps() as swaps:
        swaps.afterwards(undo)
    assert len(seen) == 2


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A program that embeds Python handles signals itself; the list: of those set by somebody."""
    touched: list[int] = []

    def set_handler(number: int, handler: Any) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable")
        touched.append(number)

    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", set_handler)
    return touched


def test_handlers_that_are_not_pythons_stay(embedded: list[int]) -> None:
    model = make("llama")
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        engine.forward_backward(IDS, IDS)
    with SignalWatch() as watch:
        watch.check()
    assert not embedded


def test_a_watch_that_is_interrupted_while_it_begins_leaves_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    set_handler = signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        previous = set_handler(number, handler)
        if handler not in before:
            raise KeyboardInterrupt
        return previous

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), SignalWatch():
            pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_memory_is_known_where_proc_and_sys_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def hidden(path: Path, *given: Any, **named: Any) -> str:
        if str(path).startswith(("/proc", "/sys")):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", hidden)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory(torch.device("cpu")) < pages
    model = make("llama")
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        engine.forward_backward(IDS, IDS)
