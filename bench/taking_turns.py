"""What it costs the host that two chunks of a sparse fill take turns: greenlets against threads.

    python bench/taking_turns.py [--json FILE]

Evaluates random tokens with pages that spill, with the engine's own turns and with two threads that
wake each other up, by turns themselves; the losses must be equal. On a GPU with Qwen2.5-7B's shape:
chunks of 512, where the host is slower than the GPU, and of 4096. Without one with a model so small
that the host's time is all there is. Prints milliseconds per visit of a chunk to a layer (medians)
and their ratio, and how many of them the host waited for a page list: so much time it has to spare.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import oomb
from oomb.cli.bench_step import prepare_lists, with_selection
from oomb.core import loop
from oomb.trace.shapes import SHAPES, random_model


class Threads:
    """The turns of :class:`oomb.core.alternation.Alternation`, by two threads; no errors."""

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


ROUNDS = 5
TURNS = {"threads": Threads, "greenlets": loop.Alternation}
Prepare = Callable[[oomb.Engine, int], None]


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


def measure(
    network: PreTrainedModel,
    length: int,
    prepare: Prepare,
    selection: str = "synthetic",
    **settings: Any,
) -> list[dict[str, Any]]:
    config = with_selection(oomb.Config(**settings), selection, network.config.num_hidden_layers)
    visits = -(-length // config.chunk_size) * network.config.num_hidden_layers
    rows: list[dict[str, Any]] = []
    losses = set()
    with oomb.Engine(network, config) as engine:
        ids = torch.randint(network.config.vocab_size, (1, length), device=network.device)
        prepare(engine, length)
        engine.evaluate(ids, ids)  # compiles kernels and gets host memory
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
                        "ms_a_visit": seconds / visits * 1e3,
                        "list_wait_ms": waits.seconds / visits * 1e3,
                    }
                )
                print(rows[-1], flush=True)
        loop.Alternation = TURNS["greenlets"]  # type: ignore[misc, assignment]
    assert len(losses) == 1, losses
    threads, greenlets = (
        statistics.median(row["ms_a_visit"] for row in rows if row["turns"] == name)
        for name in TURNS
    )
    print(
        f"chunks of {config.chunk_size}: threads {threads:.2f} ms, greenlets {greenlets:.2f} ms, "
        f"ratio {greenlets / threads:.2f}",
        flush=True,
    )
    return rows


def on_gpu() -> list[dict[str, Any]]:
    shape = SHAPES["qwen2.5-7b"]
    network = random_model(shape, device="cuda", dtype=torch.bfloat16, positions=2**18)

    def prepare(engine: oomb.Engine, length: int) -> None:
        prepare_lists(engine.config, shape.kv_heads, length, engine._model.device)

    few = oomb.TopKPages(budget=16)
    tight = {"device_memory": "1GiB", "host_memory": "8GiB"}
    wide = {"device_memory": "8GiB", "host_memory": "20GiB"}
    return [
        *measure(network, 2**16, prepare, chunk_size=512, attention=few, **tight),
        *measure(network, 2**18, prepare, attention=oomb.TopKPages(), **wide),
    ]


def on_cpu() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    return measure(
        LlamaForCausalLM(config),
        3072,
        lambda engine, length: None,
        selection="model",
        chunk_size=16,
        page_size=16,
        attention=oomb.TopKPages(budget=4),
        device_memory="64KiB",
        host_memory="64MiB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    torch.manual_seed(0)
    rows = on_gpu() if torch.cuda.is_available() else on_cpu()
    if path:
        write_record(path, rows)


if __name__ == "__main__":
    main()
