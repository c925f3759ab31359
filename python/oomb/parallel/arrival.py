"""Ranks connect when all are there: one that fails, has ended or does not come is named.

rank 0   here ─ looks for the others ─ all there ─ connects ─ in vain: raises what rank 1 met
rank 1   here ─ looks for the others ─ all there ─ fails ─ key ┘
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from oomb.parallel.failure import Failure, RankLostError
from oomb.parallel.peers import first_ended, place_of_this

T = TypeVar("T")

_LOOK_SECONDS = 0.25


def connected(
    connect: Callable[[], T], store: Any, name: str, rank: int, members: list[int], wait: timedelta
) -> T:
    """What ``connect`` returns, which all ranks call when the last of them is here.

    Args:
        store: of the job.
        name: of this connection in the store.
        rank: this one in the job.
        members: all of them, likewise.
        wait: for the last of them.

    Raises:
        RankLostError: one has ended, or does not come; what ``connect`` raised on any of them.
    """
    store.set(_place(rank), pickle.dumps(place_of_this()).hex())
    store.set(_here(name, rank), "1")
    deadline, look = time.monotonic() + wait.total_seconds(), 0.001
    while not store.check([_here(name, other) for other in members]):
        _expect_others(store, name, rank, members, wait if time.monotonic() > deadline else None)
        time.sleep(look)
        look = min(_LOOK_SECONDS, 2 * look)
    try:
        return connect()
    except Exception as error:
        _expect_others(store, name, rank, members, None)
        failure = Failure.of(rank, error)
        refuse(store, name, failure)
        failure.raise_again(error)
        raise


def refuse(store: Any, name: str, failure: Failure) -> None:
    """Tell those who connect, now or later, that it is in vain; ``name`` as of `connected`."""
    store.set(_failed(name), pickle.dumps(failure).hex())


def refusal(store: Any, name: str) -> Failure | None:
    """What one of them has told the others so; None: nothing."""
    return _read(store, _failed(name)) if store.check([_failed(name)]) else None


def _expect_others(
    store: Any, name: str, rank: int, members: list[int], waited: timedelta | None
) -> None:
    """Raise where one has failed or ended; and, after a wait, where one is not here."""
    failure = refusal(store, name)
    if failure is not None:
        failure.raise_again(None)
    known = [other for other in members if store.check([_place(other)])]
    ended = first_ended([_read(store, _place(other)) for other in known])
    if ended is not None:
        raise Failure.of(rank, RankLostError(f"rank {known[ended]} has ended")).error()
    if waited is not None:
        missing = [other for other in members if not store.check([_here(name, other)])]
        text = f"expected ranks {members} to connect within {waited}, got none of {missing}"
        raise Failure.of(rank, RankLostError(text)).error()


def _place(rank: int) -> str:
    return f"oomb/place/{rank}"


def _failed(name: str) -> str:
    return f"{name}/failed"


def _here(name: str, rank: int) -> str:
    return f"{name}/here/{rank}"


def _read(store: Any, key: str) -> Any:
    return pickle.loads(bytes.fromhex(store.get(key).decode()))
