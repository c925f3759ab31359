"""Two threads that take turns: only one runs at a time, and each says where it stops."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import torch


class _Stopped(BaseException):
    """Ends the second thread after the first has failed."""


class Alternation:
    """Runs two pieces of work in strict turns.

        caller's thread  ──work 0──┐           ┌──work 0──┐           ┌──
                                   └─ pass_on ─┘          └─ pass_on ─┘
        second thread               ──work 1──             ──work 1──

    The order of what they do is fixed by where they pass on, so results do not depend on timing.
    The second thread sees the caller's grad mode, autocast, CUDA stream and context variables.
    """

    def __init__(self) -> None:
        self._gates = (threading.Semaphore(0), threading.Semaphore(0))
        self._finished = [False, False]
        self._stopping = False
        self._failure: BaseException | None = None
        self._second: threading.Thread | None = None

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both to their end. ``first`` starts; an error in either ends both and is raised."""
        context = contextvars.copy_context()
        body = _with_state_of_this_thread(second)
        self._second = threading.Thread(
            target=lambda: context.run(self._run_second, body), name="oomb fill", daemon=True
        )
        self._second.start()
        try:
            first()
            self._finished[0] = True
            self._gates[1].release()
            while not self._finished[1]:  # one turn: nobody is left to pass it on to
                self._gates[0].acquire()
        except BaseException:
            self._stopping = True
            raise
        finally:
            self._gates[1].release()
            self._second.join()
        if self._failure is not None:
            raise self._failure

    def pass_on(self) -> None:
        """Let the other one run until it passes on or ends."""
        mine = int(threading.current_thread() is self._second)
        if self._finished[1 - mine]:
            self._raise_failure(mine)
            return
        self._gates[1 - mine].release()
        self._gates[mine].acquire()
        self._raise_failure(mine)

    def _raise_failure(self, mine: int) -> None:
        if mine == 1 and self._stopping:
            raise _Stopped
        if mine == 0 and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run_second(self, body: Callable[[], None]) -> None:
        self._gates[1].acquire()
        try:
            if not self._stopping:
                body()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._finished[1] = True
            self._gates[0].release()


def _with_state_of_this_thread(body: Callable[[], None]) -> Callable[[], None]:
    """``body`` under what torch keeps per thread and the caller has set."""
    grad = torch.is_grad_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in ("cpu", "cuda")
    ]
    cached = torch.is_autocast_cache_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            (cpu, cpu_type, cpu_on), (gpu, gpu_type, gpu_on) = autocast
            with (
                torch.autocast(cpu, cpu_type, cpu_on, cached),
                torch.autocast(gpu, gpu_type, gpu_on, cached),
            ):
                body()

    return run
