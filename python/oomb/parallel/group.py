"""The ranks of one sequence: process groups of the engine's own, and what is sent through them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from oomb.errors import Error
from oomb.held_signals import with_signals_held
from oomb.parallel.arrival import connected, refusal, refuse
from oomb.parallel.failure import Alarm, Failure, RankLostError
from oomb.parallel.leaving import let_go
from oomb.parallel.notes import gathered
from oomb.parallel.own_groups import gloo, on_gpus, options_of, own_connection
from oomb.parallel.peer_copies import PeerCopies
from oomb.parallel.peer_sums import PeerSums
from oomb.parallel.peers import Place, first_ended, place_of_this

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # of one collective: the slowest rank may be pinning its memory
PATIENCE = timedelta(hours=12)  # a rank may be tokenising, uploading or generating alone
_LOOK = timedelta(seconds=0.25)  # how often a wait on the host looks at the alarm
_ENDS = timedelta(minutes=1)  # a work whose future is done
_ON_ITS_WAY = 20.0  # seconds, for what a rank has sent before it closed or ended

_engines: Counter[tuple[int, ...]] = Counter()


class Ranks:
    """Collectives among the ranks of one sequence, in that order; each ends where one rank fails.

    Groups are made directly over the job's store, under a name of their own: the user's groups are
    never aborted, no communicator is split from them, and after a failure the next call makes new
    ones. Notes go through gloo. So do tensors on CPUs; on GPUs ranks copy them into each other's
    memory, or NCCL carries them where that cannot be reached.

    Args:
        members: ranks of the job, in the order of the sequence.
        device: where the tensors are; like ``members`` an attribute.
        timeout: of one collective.

    Attributes:
        rank: this one's place among them.
        size: their number.
        peers: exchanges without a library, where tensors are on GPUs; None: not.
        sums: those beside other work, likewise.
        stopwatch: measures exchanges of tensors; None: nobody does.
        meanwhile: what can be done beside an exchange; None: nothing.
    """

    def __init__(
        self, members: list[int], device: torch.device, timeout: timedelta = TIMEOUT
    ) -> None:
        self.members = members
        self._own = dist.get_rank()  # of the job
        self.rank = members.index(self._own)
        self.size = len(members)
        self.stopwatch: Any = None
        self.meanwhile: Callable[[], object] | None = None
        self.device = device
        self._timeout = timeout
        key = tuple(members)
        self._name = f"oomb/{'-'.join(map(str, key))}/{_engines[key]}"
        _engines[key] += 1
        self._generation = 0
        self._calls = 0
        self._notes: Any = None
        self._tensors: Any = None
        self._weights: Any = None
        self.peers: PeerCopies | None = None
        self.sums: PeerSums | None = None
        self._border: Any = None
        self._alarm: Alarm | None = None
        self._settled = False
        self._places: list[Place] = []
        self._process, self._closed = os.getpid(), False
        self._connect()
        self._places = self._gather_notes(place_of_this())

    # A call ---------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the engine: an error of one rank inside is raised by all of them.

        After one the next call makes new groups, since the old ones may hold half a collective.
        """
        self._connect()
        self._calls += 1
        self._settled = False
        key = f"{self._name}/failure/{self._calls}"
        alarm = self._alarm = Alarm(own_connection(), key, self._abort, self._lost)
        try:
            yield
        except BaseException as error:
            if self._settled or self._is_inherited:  # nobody waits for what this process does
                raise
            failure = alarm.ring(Failure.of(self._own, error))
            self._disconnect(failed=True)
            failure.raise_again(error)
        finally:
            self._alarm = None
            alarm.end()

    def settle(self, work: Callable[[], object]) -> None:
        """Do the last thing of a call, which either all ranks do or none."""

        def settle() -> None:
            self.collect(self._expect_in_time)
            self._settled = True
            work()

        with_signals_held(settle)

    def border(self) -> None:
        """A chunk ends. No host is more than one ahead of another, nor of a rank that is gone.

        The wait is for the chunk before, so that hosts need not come here together.
        """
        before, self._border = self._border, self._notes.allreduce([torch.ones(1)])
        if before is not None:
            self._wait_on_host(before)
        self._expect_in_time()

    def close(self) -> None:
        """Leave the others; who waits for this rank, now or later, is told that it is gone.

        A process forked from a rank's own is none of the ranks: there nothing is done.
        """
        if self._is_inherited:
            return
        self._closed = True
        gone = Failure.of(self._own, RankLostError(f"rank {self._own} has closed its engine"))
        with suppress(Exception):  # the store has ended
            name = self._name_of(self._generation + (self._notes is not None))  # the next one
            refuse(c10d._get_default_store(), name, gone)
        if self.device.type == "cuda" and self._tensors is not None:
            torch.cuda.synchronize()  # what is under way may end
        self._disconnect(failed=False)

    @property
    def _is_inherited(self) -> bool:
        """In a process forked from a rank's own, which has none of the groups' threads."""
        return os.getpid() != self._process

    def _expect_usable(self) -> None:
        """Raise where a collective would wait for ever; before the first one of a call."""
        if self._is_inherited:
            raise Error(
                f"ranks: expected a call in process {self._process}, which is one of them, got one "
                f"in process {os.getpid()}, forked from it"
            )
        if self._closed:
            raise Error("ranks: expected a call before they were closed, got one after it")

    def _connect(self) -> None:
        self._expect_usable()
        if self._notes is not None:
            return
        lost = self._lost()
        if lost is not None:  # it would be waited for until the store gives up
            raise lost.error()
        store, name = c10d._get_default_store(), self._name_of(self._generation)
        of_notes = partial(gloo, name, self.rank, self.size, self._timeout)
        notes = connected(of_notes, store, name, self._own, self.members, self._timeout)
        self._notes = self._tensors = notes
        if self.device.type == "cuda":
            connect = partial(on_gpus, name, self.rank, self.members, self._timeout)
            try:
                self._tensors, self._weights = self.together(connect)
            except BaseException:
                if self._notes is not None:  # else that has been done
                    self._disconnect(failed=True)
                raise
            self.peers, of_sums = (
                PeerCopies(self.device, self.rank, self.size, self.collect, self._timeout)
                for _ in range(2)
            )
            self.sums = PeerSums(self.device, self.size, of_sums)

    def _name_of(self, generation: int) -> str:
        return f"{self._name}/{generation}"

    def _lost(self) -> Failure | None:
        index = first_ended(self._places)
        if index is None:
            return None
        return Failure.of(self._own, RankLostError(f"rank {self.members[index]} has ended"))

    def _gone(self) -> Failure | None:
        """A rank that has ended or closed; None: none that can be seen from here has."""
        with suppress(Exception):  # the store has ended
            store, name = c10d._get_default_store(), self._name_of(self._generation + 1)
            return self._lost() or refusal(store, name)
        return None

    def _disconnect(self, *, failed: bool) -> None:
        self._abort()
        for copies in self._copies:
            with suppress(RuntimeError):  # the GPU itself has failed
                copies.close()
        if failed and self._notes is not None:
            let_go(self._notes)
        self._notes = self._tensors = self._weights = self._border = None
        self.peers = self.sums = None
        self._generation += 1

    def _abort(self) -> None:
        """Frees whoever waits in a collective on the GPU."""
        if self.peers is not None:
            for copies in self._copies:
                copies.abort()
            for group in (self._tensors, self._weights):
                with suppress(RuntimeError):
                    group.abort()

    def _expect_in_time(self) -> None:
        for copies in self._copies:
            copies.expect_in_time()

    @property
    def _copies(self) -> list[PeerCopies | PeerSums]:
        return [x for x in (self.peers, self.sums) if x is not None]

    # Agreement ------------------------------------------------------------------------------------

    def collect(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returned on each rank. An error of one is raised by all; nothing hangs.

        What it returns is small: numbers and texts.
        """
        self._connect()
        note: tuple[Failure | None, T | None]
        own: BaseException | None = None
        try:
            note = None, work()
        except BaseException as error:
            own = error
            note = Failure.of(self._own, error), None
        notes: list[tuple[Failure | None, Any]] = self._gather_notes(note)
        for failure, _ in notes:
            if failure is not None:
                failure.raise_again(own)
        return [value for _, value in notes]

    def together(self, work: Callable[[], T]) -> T:
        """As :meth:`collect`, for what is this rank's alone."""
        kept: list[T] = []
        self.collect(lambda: kept.append(work()))
        return kept[0]

    def _gather_notes(self, note: object) -> list[Any]:
        return gathered(note, partial(self._all_gather, self._notes))

    # Tensors --------------------------------------------------------------------------------------

    def all_to_all(
        self, send: torch.Tensor, send_sizes: list[int], received_sizes: list[int], largest: int
    ) -> torch.Tensor:
        """Elements [sum of received_sizes], of each rank in turn; ``send`` is flat, likewise.

        Args:
            largest: at least the size of every message between two ranks; the same on all of them.
        """
        received = send.new_empty(sum(received_sizes))
        peers, group = self.peers, self._tensors
        with self.measured():
            if peers and peers.all_to_all(send, send_sizes, received, received_sizes, largest):
                self.expect_no_failure()
                return received
            on_gpu = self.device.type == "cuda"
            options = options_of(c10d.AllToAllOptions(), on_gpu)
            if on_gpu:
                of, to = list(send.split(send_sizes)), list(received.split(received_sizes))
                # NCCL would move a rank's own part beside the others', through the same channels.
                to[self.rank].copy_(of[self.rank])
                of[self.rank] = to[self.rank] = send[:0]
                work = group.alltoall(to, of, options)
            else:
                work = group.alltoall_base(received, send, received_sizes, send_sizes, options)
            self._wait(work, on_gpu=on_gpu)
        return received

    def gather_into(self, out: torch.Tensor, x: torch.Tensor, *, later: bool) -> Any:
        """Write the elements of all ranks, in their order, into a tensor for all of them.

        Args:
            later: on a GPU the stream does not wait; the work that is returned can be waited for.
                It runs beside other exchanges, on a connection of its own.
        """
        on_gpu = self.device.type == "cuda"
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        if not later:
            options = options_of(options, on_gpu)
        with nullcontext() if later else self.measured():
            group = self._weights if on_gpu else self._tensors
            work = group._allgather_base(out.view(-1), x.view(-1), options)
            if later and on_gpu:
                return work
            self._wait(work, on_gpu=on_gpu)
        return None

    def add_up(self, flat: torch.Tensor) -> bool:
        """:meth:`~oomb.parallel.peer_copies.PeerCopies.add_up`; False: nothing was done."""
        with self.measured():
            if self.peers is None or not self.peers.add_up(flat):
                return False
            self.expect_no_failure()
        return True

    def all_gather(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """[ranks, …]: the tensor of each rank; of that shape what it comes into."""
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape) if into is None else into
        with self.measured():
            if self.peers is None or not self.peers.gather(x, parts):
                return self._all_gather(self._tensors, x, parts)
            self.expect_no_failure()
        return parts

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, added in their order; the same bits on each."""
        parts = self.all_gather(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def _all_gather(self, group: Any, x: torch.Tensor, parts: Any = None) -> torch.Tensor:
        into: torch.Tensor = x.new_empty(self.size, *x.shape) if parts is None else parts
        on_gpu = x.device.type == "cuda"
        options = options_of(c10d.AllgatherOptions(), on_gpu)  # type: ignore[attr-defined]
        work = group._allgather_base(into.view(-1), x.contiguous().view(-1), options)
        self._wait(work, on_gpu=on_gpu)
        return into

    def measured(self) -> Any:
        """Inside, an exchange of tensors takes place."""
        if self.stopwatch is None:
            return nullcontext()
        return self.stopwatch.running(self.device)

    def _wait(self, work: Any, *, on_gpu: bool) -> None:
        """Until a collective is done; on a GPU, until the stream waits for it."""
        if not on_gpu:
            self._wait_on_host(work)
            return
        if work is not None:
            work.wait()
        self.expect_no_failure()

    def expect_no_failure(self) -> None:
        """Raise where another rank of the call has failed."""
        if self._alarm is not None:
            self._alarm.expect_none()

    def _wait_on_host(self, work: Any) -> None:
        """Short waits, since a rank that waits in gloo cannot be freed by anybody.

        The future is asked whether it is over, not the work: that takes the work's lock with
        Python's held, and what ends the work under torch's profiler takes them the other way round.
        """
        alarm, over = self._alarm, work.get_future()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not over.done():
            with suppress(RuntimeError):  # not yet, or an error, which the last wait raises
                work.wait(_LOOK)
                return
            if alarm is not None:
                alarm.expect_none()
            elif self._gone() is not None:  # a process forked from it may keep connections open
                deadline = min(deadline, time.monotonic() + _ON_ITS_WAY)
            if time.monotonic() > deadline:
                self._explain(TimeoutError(f"no answer within {self._timeout}"))
        try:
            work.wait(_ENDS)
        except RuntimeError as error:
            self._explain(error)

    def _explain(self, error: BaseException) -> None:
        if self._alarm is None:
            gone = self._gone() or Failure.of(self._own, RankLostError.of(error))
            self._disconnect(failed=True)
            raise gone.error() from error
        self._alarm.explain(self._own, error).raise_again(None)
