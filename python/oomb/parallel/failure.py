"""One rank's error becomes every rank's: a key in the job's store, and a thread that watches it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from oomb.errors import Error, OutOfMemoryError, UnsupportedModelError

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.5  # between a connection that breaks and the key that says why

_SHARED: set[type[BaseException]] = {  # not by their names, which other packages have too
    *(ValueError, Error, OutOfMemoryError, UnsupportedModelError),
    torch.OutOfMemoryError,
}
_MADE: dict[str, Callable[[str], BaseException]] = {
    kind.__name__: kind for kind in (ValueError, Error, OutOfMemoryError, UnsupportedModelError)
}


def raise_alike(kind: type[BaseException], made: Callable[[str], BaseException]) -> None:
    """Errors of a class that this package does not know are raised as such by all ranks.

    Args:
        made: from ``[rank 1] `` and the text of the error.
    """
    _SHARED.add(kind)
    _MADE[kind.__name__] = made


def failed_rank(error: BaseException) -> int | None:
    """The rank of the job that an error comes from; None: it is not one that ranks share."""
    failure = getattr(error, "_failure_of_ranks", None)
    return failure.rank if isinstance(failure, Failure) else None


class RankLostError(Error):
    """A rank of the job has ended, has closed its engine, or does not answer."""

    @staticmethod
    def of(error: BaseException) -> RankLostError:
        """For a connection that broke."""
        return RankLostError(
            f"a rank of the sequence has ended or does not answer ({_first_line(error)})"
        )


raise_alike(RankLostError, RankLostError)


@dataclass(frozen=True)
class Failure:
    """What went wrong, and on which rank of the job."""

    rank: int
    kind: str
    text: str

    @staticmethod
    def of(rank: int, error: BaseException) -> Failure:
        known = getattr(error, "_failure_of_ranks", None)
        if isinstance(known, Failure):
            return known
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind in _SHARED)
        kind = next(kinds, "")
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        return Failure(rank, kind, text)

    def known_to_all(self, error: BaseException) -> BaseException:
        """An error that every rank raises; nobody has to be told of it."""
        with suppress(AttributeError):  # an exception that takes no note
            error._failure_of_ranks = self  # type: ignore[attr-defined]
        return error

    def error(self) -> BaseException:
        """The same on every rank: of the class it had, where that is one of ours."""
        kind = _MADE.get(self.kind, Error)
        return self.known_to_all(kind(f"[rank {self.rank}] {self.text}"))

    def raise_again(self, own: BaseException | None) -> None:
        """Raise it on a rank.

        Args:
            own: what this rank met itself. An exception that is not ours (a callback's, Ctrl-C)
                goes on as it is, for whoever waits for it.
        """
        raised_before = getattr(own, "_failure_of_ranks", None) == self
        foreign = type(own) not in _SHARED and not isinstance(own, Error)
        if own is not None and (raised_before or (foreign and Failure.of(self.rank, own) == self)):
            raise self.known_to_all(own)
        raise self.error() from own


class Alarm:
    """Tells all ranks of a call that one of them has failed.

        rank 0   exchange … waits ─────────────┐ watcher sees the key: abort; raises Failure
        rank 1   layer 7: out of memory ─ key ─┘ raises Failure

    Args:
        store: of the job; the watcher has a connection of its own.
        key: of this call.
        abort: frees whoever waits for the others on this rank; called once, from the watcher.
        lost: a rank that can no longer tell anything; None: none.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        abort: Callable[[], None],
        lost: Callable[[], Failure | None] = lambda: None,
    ) -> None:
        self._store = store
        self._lost = lost
        self._key = key
        self._abort = abort
        self._over = threading.Event()
        self._seen: Failure | None = None
        self._thread = threading.Thread(target=self._watch, name="oomb ranks", daemon=True)
        self._thread.start()

    def ring(self, failure: Failure) -> Failure:
        """Tell the others; the failure of the call, which is another's where that came first."""
        try:
            first = self._store.compare_set(self._key, "", pickle.dumps(failure).hex())
            self._seen = _read(first)
        except Exception:  # the store is gone with the rank that kept it
            self._seen = self._seen or failure
        return self._seen

    def expect_none(self) -> None:
        """Raise where the watcher has seen a failure."""
        if self._seen is not None:
            self._seen.raise_again(None)

    def explain(self, rank: int, error: BaseException) -> Failure:
        """Why a connection broke: what the others say, or that one of them is gone."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._seen is None and time.monotonic() < deadline:
            self._over.wait(_POLL_SECONDS / 4)
        return self._seen or Failure.of(rank, RankLostError.of(error))

    def end(self) -> None:
        """The call is over."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            try:
                if self._store.check([self._key]):
                    self._seen = self._seen or _read(self._store.get(self._key))
                else:
                    self._seen = self._seen or self._lost()
            except Exception as error:
                text = f"the store of the job does not answer ({_first_line(error)})"
                self._seen = self._seen or self._lost() or Failure(-1, "Error", text)
            if self._seen is not None:
                with suppress(Exception):
                    self._abort()
                return


def _read(value: bytes) -> Failure:
    failure: Failure = pickle.loads(bytes.fromhex(value.decode()))
    return failure


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
