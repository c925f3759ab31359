"""Where the seconds of making an engine go: its stages, and the operations called in them."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oomb.engine.engine as engine_module
import oomb.model.structure as structure

# Functions that are called once or twice in a construction, none inside another.
_STAGES = [
    (engine_module, "admitted"),
    (structure, "_own"),
    (structure, "_own_where_it_can"),
    (structure, "attention_shapes"),
    (structure, "_check_attention"),
    (structure, "_check_head"),
    (structure, "_check_layers"),
    (engine_module, "Calls"),
]
_ROWS = 20


class Stages(TorchDispatchMode):
    """Measures one construction at a time; waits for the device behind every operation.

    What a process pays once (kernels that a library loads when they are first launched, Triton's
    compiler, modules, files that are read from the disk) is the first construction's less the
    second's.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.stages: list[dict[str, dict[str, float]]] = []
        self.operations: list[dict[str, list[float]]] = []
        self.modules: list[set[str]] = []

    def measure(self, construct: Callable[[], object]) -> None:
        """One construction more."""
        self.stages.append(defaultdict(lambda: defaultdict(float)))
        self.operations.append(defaultdict(list))
        before = set(sys.modules)
        with ExitStack() as patched:
            for owner, name in _STAGES:
                staged = self._staged(name, getattr(owner, name))
                patched.enter_context(mock.patch.object(owner, name, staged))
            if (launched := _triton_launcher()) is not None:
                run = self._timed_launch(launched.run)
                patched.enter_context(mock.patch.object(launched, "run", run))
            patched.enter_context(self)
            with self._stage("all"):
                construct()
        self.modules.append(set(sys.modules) - before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._synchronize()
        self.operations[-1][str(func)].append(time.perf_counter() - begin)
        return result

    def print(self) -> None:
        first, second = self.stages[0], self.stages[-1]
        print(f"\n{'stage':24s} {'first':>8s} {'last':>8s} {'faults':>8s} {'MB read':>8s}")
        for name, costs in first.items():
            print(
                f"{name.strip('_'):24s} {costs['seconds']:8.3f} {second[name]['seconds']:8.3f} "
                f"{costs['faults']:8.0f} {costs['read'] / 1e6:8.1f}"
            )
        once = {
            name: (sum(calls) - sum(self.operations[-1].get(name, [0.0])), max(calls), len(calls))
            for name, calls in self.operations[0].items()
        }
        print(f"\n{'operation':56s} {'once':>8s} {'longest':>8s} {'calls':>6s}")
        for name, (paid, longest, calls) in sorted(once.items(), key=lambda x: -x[1][0])[:_ROWS]:
            print(f"{name[:56]:56s} {paid:8.3f} {longest:8.3f} {calls:6d}")
        total = sum(paid for paid, _, _ in once.values())
        print(f"{'all operations':56s} {total:8.3f}")
        packages = sorted({name.partition(".")[0] for name in self.modules[0]})
        print(f"\nmodules imported: {len(self.modules[0])} of {', '.join(packages) or 'none'}")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._synchronize()
        begin, before = time.perf_counter(), _read()
        yield
        self._synchronize()
        costs = self.stages[-1][name]
        costs["seconds"] += time.perf_counter() - begin
        for what, count in _read().items():
            costs[what] += count - before[what]

    def _staged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def staged(*args: Any, **keywords: Any) -> Any:
            with self._stage(name):
                return function(*args, **keywords)

        return staged

    def _timed_launch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(kernel: Any, *args: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = run(kernel, *args, **keywords)
            self._synchronize()
            name = f"triton {getattr(kernel, '__name__', kernel)}"
            self.operations[-1][name].append(time.perf_counter() - begin)
            return result

        return timed


def _triton_launcher() -> Any:
    """The class whose ``run`` launches Triton's kernels; None where there is no Triton."""
    runtime = sys.modules.get("triton.runtime.jit")
    return None if runtime is None else runtime.JITFunction  # type: ignore[attr-defined]


def _read() -> dict[str, float]:
    """Page faults that waited for the disk, and bytes that this process had read from it."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        lines = []
    read = next((line.split()[1] for line in lines if line.startswith("read_bytes")), "0")
    return {"faults": float(faults), "read": float(read)}
