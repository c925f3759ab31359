"""A group that cannot end keeps nobody waiting, and ends when nobody holds it any more."""

from __future__ import annotations

import threading

from oomb.parallel.leaving import let_go


class Group:
    """Its destructor waits, as Gloo's does."""

    def __init__(self) -> None:
        self.may_end, self.ended_in = threading.Event(), [threading.current_thread()]
        self.begins, self.ended = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.begins.set()
        self.may_end.wait(20)
        self.ended_in[0] = threading.current_thread()
        self.ended.set()


def test_a_destructor_that_waits_keeps_nobody_waiting() -> None:
    group = Group()
    begins, may_end, ended, place = group.begins, group.may_end, group.ended, group.ended_in
    let_go(group)
    assert not begins.wait(0.3)  # somebody holds it
    del group
    assert begins.wait(10) and not ended.is_set()
    may_end.set()
    assert ended.wait(10) and place[0] is not threading.current_thread()
