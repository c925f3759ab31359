"""What the page manager costs the host, and how it lays pages in host memory, without a GPU.

    python bench/cpu_page_manager.py                    # five steps, the longest of 512K tokens
    python bench/cpu_page_manager.py --tokens 64K       # the steps of that length alone

The page manager goes through whole calls on pages that hold nothing (Qwen2.5-7B's attention, chunks
of 4096, fp32 dKV). For the fill and the sweep this prints two figures:

- the milliseconds that the manager's calls take in a visit of a chunk to a layer, on average. A GPU
  waits for the host where they are more than the kernels of that visit take.
- how many slots in a row are neighbours on the host, on average, in a batch of copies. Copies of
  neighbours are the faster ones, see ``page_copy.py --only runs``.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from oomb.config import Config, TopKPages
from oomb.core.layout import Chunks, GradientReach
from oomb.core.page_demand import Choices
from oomb.core.tiers import Caps, PageLayout
from oomb.model.layer_shape import LayerShape
from oomb.plan import dry_run
from oomb.plan.pages import PageCall

GIB = 2**30
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 28, 28, 4, 128
WAYS = {"stored": ("d2h_bytes", "stored_runs"), "loaded": ("h2d_bytes", "loaded_runs")}

dry_run._PAGE_VISITS = dry_run._VISITS = 10**12  # every page of every layer


class Step(NamedTuple):
    """A call of one sequence, and the share of its pages that the device tier may hold."""

    tokens: int
    rule: TopKPages | None
    device_gib: int

    @property
    def length(self) -> str:
        return f"{self.tokens >> 10}K"

    def __str__(self) -> str:
        kind = "sparse" if self.rule else "exact"
        return f"{self.length}, {kind}, {self.device_gib} GiB on the device"


STEPS = (
    Step(2**16, TopKPages(), 2),
    Step(2**17, TopKPages(), 4),
    Step(2**17, None, 8),
    Step(2**18, TopKPages(), 8),
    Step(2**19, TopKPages(), 16),
)


class Clocked:
    """A page manager, and the seconds that its methods take."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._manager, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return call


class Run(dry_run.DryRun):
    """A dry run that prints the two figures for its fill and for its sweep."""

    def _fill(self) -> None:
        self._part("fill", super()._fill, self._call.filled)

    def _sweep(self) -> None:
        self._part("sweep", super()._sweep, 2 * len(self._call.swept))

    def _part(self, name: str, part: Callable[[], None], turns: int) -> None:
        pages = self._pages
        plain, clocked = pages.manager, Clocked(pages.manager)
        before = plain.stats()
        self._pages = replace(pages, manager=clocked)  # type: ignore[arg-type]
        part()
        self._pages = pages
        each = {k: v / (turns * LAYERS) * 1e3 for k, v in clocked.seconds.items()}
        largest = sorted(each.items(), key=lambda entry: -entry[1])[:4]
        split = ", ".join(f"{k} {v:.2f}" for k, v in largest)
        print(f"  {name:5} {sum(each.values()):6.2f} ms a visit: {split}")
        after = plain.stats()
        for way, (moved, runs) in WAYS.items():
            copied = getattr(after, moved) - getattr(before, moved)
            each_run = max(1, getattr(after, runs) - getattr(before, runs))
            slots = copied / self._call.layout.slot_bytes / each_run
            print(f"  {name:5} {way} {copied / GIB:6.1f} GiB, {slots:6.1f} slots in a row")


def run(step: Step) -> None:
    """One call with a host tier that holds whatever the device tier does not."""
    chunks = Chunks(step.tokens - 1, Config().chunk_size, Config().page_size)
    layout = PageLayout.of(KV_HEADS, HEAD_DIM, chunks.page_size, torch.bfloat16, "float32")
    call = PageCall(
        chunks=chunks,
        reach=GradientReach(tuple(range(chunks.number)), None),
        shapes=(LayerShape(HEADS, KV_HEADS, HEAD_DIM, 0),) * LAYERS,
        layout=layout,
        batch=1,
        device_type="cuda",
        selection=step.rule,
        choices=Choices(),
    )
    slots = GIB // layout.slot_bytes
    print(step)
    Run(call, Caps(step.device_gib * slots, 1, 256 * slots)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    lengths = sorted({step.length for step in STEPS})
    parser.add_argument("--tokens", choices=lengths, help="only the steps of this length")
    tokens = parser.parse_args().tokens
    for step in STEPS:
        if tokens in (None, step.length):
            run(step)


if __name__ == "__main__":
    main()
