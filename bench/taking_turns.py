"""What it costs the host that two chunks of a sparse fill take turns: greenlets against threads.

    python bench/taking_turns.py [--json FILE]

Evaluates random tokens with pages that spill (Qwen2.5-7B's shape), with the engine's own turns and
with two threads that wake each other up; the losses must be equal. In chunks of 512, where the host
is slower than the GPU, and of 4096. Prints milliseconds per visit of a chunk to a layer, and how
many of them the host waited for a page list: so much time it has to spare.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import oomb
from oomb.cli.bench_step import SELECTORS, prepare_lists, random_tokens
from oomb.engine import loop
from oomb.testing.shapes import SHAPES, random_model


class Threads:
    """The turns of :class:`oomb.engine.alternation.Alternation`, by two threads; no errors."""

    def __init__(self) -> None:
        self._gates = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._second: threading.Thread | None = None

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        def other() -> None:
            self._gates[1].acquire()
            with torch.no_grad():
                second()
            self._end(1)

        self._second = threading.Thread(target=other)
        self._second.start()
        first()
        self._end(0)
        self._second.join()

    def _end(self, mine: int) -> None:
        self._ended[mine] = True
        self._gates[1 - mine].release()

    def pass_on(self) -> None:
        mine = int(threading.current_thread() is self._second)
        if not self._ended[1 - mine]:
            self._gates[1 - mine].release()
            self._gates[mine].acquire()


ROUNDS = 2
TURNS = {"threads": Threads, "greenlets": loop.Alternation}


class Waits:
    """Seconds in which the host waits for events of the GPU."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._synchronize = torch.cuda.Event.synchronize

    def __enter__(self) -> Waits:
        def synchronize(event: torch.cuda.Event) -> None:
            began = time.perf_counter()
            self._synchronize(event)
            self.seconds += time.perf_counter() - began

        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.Event.synchronize = self._synchronize  # type: ignore[method-assign]


def measure(length: int, **settings: Any) -> list[dict[str, Any]]:
    shape = SHAPES["qwen2.5-7b"]
    network = random_model(shape, device="cuda", dtype=torch.bfloat16, positions=length)
    config = oomb.Config(kv_grad_dtype="bfloat16", **settings)
    visits = -(-length // config.chunk_size) * shape.layers
    rows: list[dict[str, Any]] = []
    losses = set()
    with oomb.Engine(network, config) as engine:
        kind = engine._pools.selector_type = SELECTORS["synthetic"]
        ids = random_tokens(shape, length, network.device)
        prepare_lists(engine, kind, shape, length)
        for index in range(ROUNDS):
            for name, turns in TURNS.items():
                loop.Alternation = turns  # type: ignore[misc, assignment]
                began = time.perf_counter()
                with Waits() as waits:
                    losses.add(float(engine.evaluate(ids, ids).loss))
                seconds = time.perf_counter() - began
                rows.append(
                    {
                        "chunk": config.chunk_size,
                        "turns": name,
                        "round": index,
                        "seconds": seconds,
                        "ms_a_visit": seconds / visits * 1e3,
                        "list_wait_ms": waits.seconds / visits * 1e3,
                    }
                )
                print(rows[-1], flush=True)
    assert len(losses) == 1, losses
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    rows = [
        *measure(
            2**16,
            chunk_size=512,
            attention=oomb.TopKPages(budget=16),
            device_memory="1GiB",
            host_memory="8GiB",
        ),
        *measure(2**18, attention=oomb.TopKPages(), device_memory="8GiB", host_memory="20GiB"),
    ]
    if path:
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
